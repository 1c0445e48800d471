"""AdamW's moments in 8 bits an element: codes, and behind them an fp32 scale for each block of 256, in one tensor.

The scale is the largest magnitude of the block (Dettmers et al., arXiv 2110.02861, section 2.1). A first moment is the
scale times the square of code / 127, with the code's sign. A second moment, which spans the square of that range, is
the scale times the fourth power of code / 255. Rounding is stochastic and unbiased: rounded to the nearest, a moment
that changes by a thousandth in a step would never change. A second moment above zero keeps a code above zero, since
the update divides by its root.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # elements that share a scale
ALIGNMENT = 16  # bytes: the scales begin at a multiple
MOST = {True: 127, False: 255}  # the largest code of a moment that is signed, or not
SMALLEST = 1e-37  # a scale that can be divided by
AT_ONCE = 2**22  # elements that are encoded at a time, whole blocks: integers of 64 bits are large
SPREAD = 0x45D9F3B  # an odd factor that spreads the bits of a number


def room(elements: int) -> int:
    """Bytes of a moment."""
    return scales_at(elements) + 4 * -(-elements // BLOCK)


def scales_at(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def decoded(stored: Tensor, elements: int, *, signed: bool) -> Tensor:
    """The fp32 values of a moment, flat."""
    codes, scales = _parts(stored, elements, signed)
    shares = codes.float() * (1 / MOST[signed])
    values = shares * shares.abs() if signed else shares.square().square()
    return values * _each(scales, elements)


def encode_(values: Tensor, stored: Tensor, *, signed: bool, step: Tensor | None) -> None:
    """Writes fp32 ``values`` as a moment, rounded by numbers drawn from ``step`` and place; None: to the nearest."""
    flat = values.flatten()
    codes, scales = _parts(stored, flat.numel(), signed)
    for start in range(0, flat.numel(), AT_ONCE):
        part = flat[start : start + AT_ONCE]
        drawn = 0.5 if step is None else drawn_numbers(step, start, part.numel(), upper=not signed)
        first = start // BLOCK
        of_part = scales[first : first - (-part.numel() // BLOCK)]
        codes[start : start + AT_ONCE] = _encoded(part, of_part, signed, drawn)


def _encoded(values: Tensor, scales: Tensor, signed: bool, drawn: Tensor | float) -> Tensor:
    """Codes of blocks, of which only the last may be incomplete; writes their ``scales``."""
    elements, most = values.numel(), MOST[signed]
    sizes = values.abs()
    torch.amax(F.pad(sizes, (0, -elements % BLOCK)).view(-1, BLOCK), dim=1, out=scales)
    share = sizes * _each((1 / scales).masked_fill_(scales <= SMALLEST, 0.0), elements)
    root = share.sqrt() if signed else share.sqrt().sqrt()
    lower = (root * most).floor().clamp_(max=most - 1)
    below, above = (((lower + more) * (1 / most)).square() for more in (0, 1))
    if not signed:
        below, above = below.square(), above.square()
    steps = lower + (share - below > drawn * (above - below)).float()
    return steps * values.sign() if signed else torch.maximum(steps, (values > 0).float())


def drawn_numbers(step: Tensor, start: int, elements: int, *, upper: bool) -> Tensor:
    """Numbers from 0 to 1 for places from ``start`` on: the upper or lower half of a hash of step and place."""
    bits = torch.arange(start, start + elements, device=step.device) ^ spread(step.to(torch.int64))
    half = spread(bits) >> 16 if upper else spread(bits) & 0xFFFF
    return half.float() * 2**-16


def spread(bits: Tensor) -> Tensor:
    """A hash of 32 bits: two rounds of shift and multiplication."""
    for _ in range(2):
        bits = ((bits >> 16) ^ bits) * SPREAD & 0xFFFFFFFF
    return (bits >> 16) ^ bits


def _parts(stored: Tensor, elements: int, signed: bool) -> tuple[Tensor, Tensor]:
    codes = stored[:elements].view(torch.int8) if signed else stored[:elements]
    return codes, stored[scales_at(elements) :].view(torch.float32)


def _each(scales: Tensor, elements: int) -> Tensor:
    """The scale of every element."""
    return scales.repeat_interleave(BLOCK)[:elements]

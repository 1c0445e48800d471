"""The Triton casts against the plain ones: on a GPU bit by bit, in Triton's interpreter (TRITON_INTERPRET=1) but for
its rounding, which loses the carry into the exponent."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from shardwise.engine.fp8.scaling import Form, cast, format_of, whole_matrix

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or the interpreter")
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [[(256, 128), (256, 256)], [(160, 48)]]  # whole tiles, and tiles that stick out


def parts_of(shapes: list[tuple[int, int]], stacked: bool) -> list[Tensor]:
    random = torch.Generator().manual_seed(len(shapes))
    made = [torch.randn(*shape, generator=random).bfloat16() * (1 + n) for n, shape in enumerate(shapes)]
    return [(one.T.contiguous() if stacked else one).to(DEVICE) for one in made]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_both_forms(scaling: str, gradient: bool, stacked: bool, shapes: list[tuple[int, int]]) -> None:
    from shardwise.engine.fp8.kernels import cast_forms, largest_of

    parts, dtype = parts_of(shapes, stacked), format_of(scaling, gradient)
    whole = whole_matrix(parts, stacked)
    largest: list[Tensor] = []
    if scaling == "tensor":
        largest = [whole.abs().amax().float()]
    elif scaling == "row":
        largest = list(largest_of(parts, stacked))
        assert torch.equal(largest[0], whole.float().abs().amax(1))
        assert torch.equal(largest[1], whole.float().abs().amax(0))
    found = cast_forms(parts, largest, scaling, dtype, stacked, True, True)
    square = stacked and scaling == "block"
    by_row, by_column = [*largest, *largest][:2] if largest else (None, None)
    for values, scales, one, most in ((*found[:2], whole, by_row), (*found[2:], whole.T, by_column)):
        expected = cast(one, most, scaling, dtype, square)
        assert torch.allclose(scales, expected.scales, rtol=1e-6)
        same = (values.float() == expected.values.float()).float().mean()
        bits = 2 if gradient and scaling == "tensor" else 3  # of the fraction
        assert same > (1 - 2 ** -(bits + 1.0) if INTERPRETED else 0.999), float(same)  # a scale's last bit may differ
        off = (Form(values, scales, square).wide() - one.float()).norm() / one.float().norm()
        assert off < (0.8 if INTERPRETED else 0.24) * 2.0**-bits, float(off)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block"])
def test_a_form_that_is_not_wanted_is_empty(scaling: str) -> None:
    from shardwise.engine.fp8.kernels import cast_forms, largest_of

    parts = parts_of(SHAPES[0], False)
    largest = {
        "tensor": [whole_matrix(parts, False).abs().amax().float()],
        "row": list(largest_of(parts, False)),
        "block": [],
    }
    both = cast_forms(parts, largest[scaling], scaling, torch.float8_e4m3fn, False, True, True)
    plain = cast_forms(parts, largest[scaling], scaling, torch.float8_e4m3fn, False, True, False)
    turned = cast_forms(parts, largest[scaling], scaling, torch.float8_e4m3fn, False, False, True)
    assert plain[2].numel() == plain[3].numel() == turned[0].numel() == turned[1].numel() == 0
    for one, other in zip((*plain[:2], *turned[2:]), both):
        assert torch.equal(one.float(), other.float())

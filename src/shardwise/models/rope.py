"""Rotary positions (RoFormer, arXiv 2104.09864) and the ways to extend them.

Feature i of the first half of a head rotates with feature i of its second half. Nothing is kept between calls: a few
dozen frequencies cost less than a buffer that every cast and move would have to leave alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.spec.model import Model, RopeScaling

Rotation = tuple[Tensor, Tensor]


def rotation_of(model: Model, positions: Tensor, *, windowed: bool = False) -> Rotation:
    """The cosines and sines [batch or 1, seq, 1, features / 2] that rotate heads at ``positions`` [batch or 1, seq].

    ``windowed``: for layers with a sliding window, if the model gives these their own frequencies.
    """
    theta, scaling = model.numerics.rope_theta, model.numerics.rope_scaling
    if windowed:
        theta, scaling = model.numerics.windowed_rope_theta or theta, None
    frequencies = rope_frequencies(model.rotated_features, theta, scaling, positions)
    angles = positions[:, :, None, None].float() * frequencies
    factor = rotation_factor(scaling)
    return angles.cos() * factor, angles.sin() * factor


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """``heads`` [batch, seq, heads, features] rotated by their positions, in fp32; features beyond the pairs stay."""
    cosine, sine = rotation
    pairs = cosine.shape[-1]
    wide = heads.float()
    first, second, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], wide[..., 2 * pairs :]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)
    return turned.type_as(heads)


def rope_frequencies(features: int, theta: float, scaling: RopeScaling | None, positions: Tensor) -> Tensor:
    """Radians per position of each pair of features."""
    device = positions.device
    steps = torch.arange(0, features, 2, device=device, dtype=torch.float32) / features
    plain = 1.0 / theta**steps
    if scaling is None:
        return plain
    if scaling.kind == "longrope":
        assert scaling.original_seq
        short, long = (
            torch.tensor(factors, device=device) for factors in (scaling.short_factors, scaling.long_factors)
        )
        return plain / torch.where(positions.max() >= scaling.original_seq, long, short)
    slowed = plain / scaling.factor
    if scaling.kind == "linear":
        return slowed
    llama3 = scaling.kind == "llama3"
    kept = _llama3_share(plain, scaling) if llama3 else _yarn_share(features, theta, scaling, device)
    return kept * plain + (1 - kept) * slowed


def _llama3_share(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """How much of each frequency is kept: all of it where it rotates often within the original sequence."""
    assert scaling.original_seq
    turns = scaling.original_seq * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency, scaling.high_frequency
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_share(features: int, theta: float, scaling: RopeScaling, device: torch.device) -> Tensor:
    """The same as a ramp over the index of the pair (arXiv 2309.00071, section 3.2)."""
    assert scaling.original_seq
    # The pair that rotates so many times within the original sequence.
    first, last = (
        features * math.log(scaling.original_seq / (times * 2 * math.pi)) / (2 * math.log(theta))
        for times in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, features - 1)
    pairs = torch.arange(features // 2, device=device, dtype=torch.float32)
    return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)


def rotation_factor(scaling: RopeScaling | None) -> float:
    """What YaRN and LongRoPE multiply the rotated features by, so that logits keep their size over more keys."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":  # arXiv 2402.13753, section 3.3
        assert scaling.original_seq
        return math.sqrt(1 + math.log(max(1.0, scaling.factor)) / math.log(scaling.original_seq))
    if scaling.mscale and scaling.mscale_all:
        return _yarn_growth(scaling.factor, scaling.mscale) / _yarn_growth(scaling.factor, scaling.mscale_all)
    return _yarn_growth(scaling.factor, 1.0)


def logit_factor(scaling: RopeScaling | None) -> float:
    """What DeepSeek's variant of YaRN multiplies the whole logit by."""
    if scaling is None or scaling.kind != "yarn" or not scaling.mscale_all:
        return 1.0
    return _yarn_growth(scaling.factor, scaling.mscale_all) ** 2


def _yarn_growth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

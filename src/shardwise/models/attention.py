"""Attention: grouped heads with rotary or no positions, and DeepSeek's latent attention.

Both read the number of heads from the tensors, never from the model's description, so that they may be cut. Three
attributes may be replaced by a callable of the same signature: ``project`` (the linear layers from hidden states to
heads), ``every_head`` (between latent vectors and their up-projections) and ``attend`` (attention itself).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.models.mlp import EveryHead, Project, as_they_are, plus_linear, project_each
from shardwise.models.norms import norm_of
from shardwise.spec.model import Model
from shardwise.spec.numerics import RopeScaling

# -- Rotary positions (RoFormer, arXiv 2104.09864) and the ways to extend them ---------------------
# Feature i of the first half of a head rotates with feature i of its second half. Nothing is kept between calls: a few
# dozen frequencies cost less than a buffer that every cast and move would have to leave alone.

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


ROTATED_AT_ONCE = 2**26  # features of heads that are in fp32 at a time: 256 MiB


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """``heads`` [batch, seq, heads, features] rotated by their positions, in fp32; features beyond the pairs stay."""
    if heads.numel() > ROTATED_AT_ONCE and not torch.compiler.is_compiling():
        rotated: Tensor = _RotatedInPieces.apply(heads, *rotation)  # type: ignore[no-untyped-call]
        return rotated
    return _rotated(heads, *rotation)


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    pairs = cosine.shape[-1]
    wide = heads.float()
    first, second, rest = wide[..., :pairs], wide[..., pairs : 2 * pairs], wide[..., 2 * pairs :]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)
    return turned.type_as(heads)


class _RotatedInPieces(torch.autograd.Function):
    """Without fp32 tensors of all heads of a long sequence. The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.rotation = cosine, sine
        rotated = torch.empty_like(heads)
        at_once = max(1, ROTATED_AT_ONCE // (heads.numel() // heads.shape[1]))
        for start in range(0, heads.shape[1], at_once):
            some = slice(start, start + at_once)
            rotated[:, some] = _rotated(heads[:, some], cosine[:, some], sine[:, some])
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.rotation
        return _RotatedInPieces.apply(gradient, cosine, -sine), None, None  # type: ignore[no-untyped-call]


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


def query_growth(model: Model, positions: Tensor) -> Tensor | None:
    """The factor of queries along long sequences (arXiv 2501.19399, as in Llama 4) at ``positions`` [batch, seq]."""
    scale, floor = model.numerics.long_query_scale, model.numerics.long_query_floor
    if scale is None:
        return None
    first = 1 if model.numerics.long_query_layers == "without-rope" else 0
    return (1 + scale * torch.log1p(torch.floor((positions.float() + first) / floor)))[:, :, None, None]


def grown(query: Tensor, arguments: AttentionArguments) -> Tensor:
    factor = arguments.query_factor
    return query if factor is None else (query * factor).to(query.dtype)


# -- Attention -------------------------------------------------------------------------------------

LATENT_EPSILON = 1e-6  # of the norms inside latent attention; DeepSeek has no setting for it

Attend = Callable[[Tensor, Tensor, Tensor, AttentionArguments], Tensor]


def attention_scale(model: Model) -> float:
    """The factor on attention scores."""
    scale: float = (model.numerics.attention_scalar or model.query_key_dim) ** -0.5
    return scale * logit_factor(model.numerics.rope_scaling) if model.mla else scale


class Attention(nn.Module):
    """Multi-head attention; with fewer key-value heads than heads, grouped-query attention (arXiv 2305.13245)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        size = model.head_size
        self.head_size = size
        self.query = nn.Linear(model.hidden, model.heads * size, bias=model.qkv_bias)
        self.key = nn.Linear(model.hidden, model.key_value_heads * size, bias=model.qkv_bias)
        self.value = nn.Linear(model.hidden, model.key_value_heads * size, bias=model.qkv_bias)
        self.output = nn.Linear(model.heads * size, model.hidden, bias=model.attention_out_bias)
        self.clip, self.normed_whole = model.numerics.clip_qkv, model.qk_norm_whole
        self.normed_rotated, whole = model.qk_norm_rotated, model.qk_norm_whole
        self.query_norm, self.key_norm = (
            norm_of(model, linear.out_features if whole else size, weighted=model.qk_norm_weight)
            if model.qk_norm
            else None
            for linear in (self.query, self.key)
        )
        self.sinks = nn.Parameter(torch.zeros(model.heads)) if model.attention_sinks else None
        self.attend: Attend = dot_product_attention
        self.project: Project = project_each

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments, residual: Tensor | None = None
    ) -> Tensor:
        """The output, added to ``residual`` if that is given."""
        return self.from_projections(self.project(hidden, *self.projections()), rotation, arguments, residual)

    def from_projections(
        self, projected: tuple[Tensor, ...], rotation: Rotation | None, arguments: AttentionArguments,
        residual: Tensor | None,
    ) -> Tensor:  # fmt: skip
        query, key, value = projected
        if self.normed_whole:
            query, key = self._normed(query, key)
        if self.clip is not None:
            query, key, value = (tensor.clamp(-self.clip, self.clip) for tensor in (query, key, value))
        query, key, value = (torch.unflatten(tensor, -1, (-1, self.head_size)) for tensor in (query, key, value))
        query, key = self.positioned(query, key, rotation)
        query = grown(query, arguments)
        if self.sinks is not None:
            arguments = replace(arguments, sinks=self.sinks)
        attended = self.attend(query, key, value, arguments)
        return plus_linear(residual, attended.flatten(-2), self.output)

    def projections(self) -> tuple[nn.Linear, ...]:
        """The linear layers that ``project`` applies to the hidden states."""
        return self.query, self.key, self.value

    def positioned(self, query: Tensor, key: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Queries and keys normed, in models that do so, and rotated by their positions; or first rotated."""
        if not (self.normed_whole or self.normed_rotated):
            query, key = self._normed(query, key)
        if rotation is None:
            return query, key
        query, key = rotate(query, rotation), rotate(key, rotation)
        return self._normed(query, key) if self.normed_rotated else (query, key)

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from one latent vector.

    Each head's query and key are a part without positions followed by a rotated part; all heads share the rotated part
    of the key. The down-projections and their norms are independent of heads.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.mla
        mla = model.mla
        self.plain_size, self.rotated_size, self.value_size = mla.nope_dim, mla.rope_dim, mla.value_dim
        self.latent_size = mla.kv_rank
        queries = model.heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_rank is None:
            self.query = nn.Linear(model.hidden, queries, bias=False)
        else:
            self.query_down = nn.Linear(model.hidden, mla.q_rank, bias=False)
            self.query_down_norm = norm_of(model, mla.q_rank, LATENT_EPSILON)
            self.query_up = nn.Linear(mla.q_rank, queries, bias=False)
        self.compressed_query = mla.q_rank is not None
        self.key_value_down = nn.Linear(model.hidden, mla.kv_rank + mla.rope_dim, bias=False)
        self.key_value_down_norm = norm_of(model, mla.kv_rank, LATENT_EPSILON)
        self.key_value_up = nn.Linear(mla.kv_rank, model.heads * (mla.nope_dim + mla.value_dim), bias=False)
        self.output = nn.Linear(model.heads * mla.value_dim, model.hidden, bias=model.attention_out_bias)
        self.attend: Attend = dot_product_attention
        self.project: Project = project_each
        self.every_head: EveryHead = as_they_are

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, arguments: AttentionArguments, residual: Tensor | None = None
    ) -> Tensor:
        """The output, added to ``residual`` if that is given."""
        sizes = (self.latent_size, self.rotated_size)
        latent, key_rotated = self.key_value_down(hidden).split_with_sizes(sizes, dim=-1)
        latent = self.key_value_down_norm(latent)
        if self.compressed_query:
            queries = self.query_down_norm(self.query_down(hidden))
            queries, latent, key_rotated = self.every_head(queries, latent, key_rotated)
        else:
            (queries,) = self.project(hidden, *self.projections())
            latent, key_rotated = self.every_head(latent, key_rotated)
        query, key, value = self.expand(queries, latent, key_rotated, rotation)
        attended = self.attend(grown(query, arguments), key, value, arguments)
        return plus_linear(residual, attended.flatten(-2), self.output)

    def projections(self) -> tuple[nn.Linear, ...]:
        """Like `Attention.projections`."""
        return () if self.compressed_query else (self.query,)

    def expand(
        self, queries: Tensor, latent: Tensor, key_rotated: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every head's query, key and value; one function of the latent vectors, so that it can be recomputed."""
        query_plain, query_rotated = self.query_parts(queries)
        key_value = self.key_value_up(latent).unflatten(-1, (-1, self.plain_size + self.value_size))
        key_plain, value = key_value.split_with_sizes((self.plain_size, self.value_size), dim=-1)
        key_rotated = key_rotated.unsqueeze(-2)
        if rotation is not None:
            query_rotated, key_rotated = rotate(query_rotated, rotation), rotate(key_rotated, rotation)
        query = torch.cat((query_plain, query_rotated), dim=-1)
        key = torch.cat((key_plain, key_rotated.expand(-1, -1, key_plain.shape[-2], -1)), dim=-1)
        return query, key, value.contiguous()  # a view would keep the keys' part of the matmul alive

    def query_parts(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Every head's query as two parts: without positions, and to be rotated."""
        if self.compressed_query:
            queries = self.query_up(queries)
        query = torch.unflatten(queries, -1, (-1, self.plain_size + self.rotated_size))
        plain, rotated = query.split_with_sizes((self.plain_size, self.rotated_size), dim=-1)
        return plain, rotated

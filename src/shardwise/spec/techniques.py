"""Which techniques there are, and when a job uses one: the words that the support matrix is written in."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from operator import mul, or_
from typing import Any

from shardwise.spec.fine_tuning import BASE_FORMATS, NF4_BLOCK
from shardwise.spec.model import Model
from shardwise.spec.schedules import ScheduleRecord, other_schedules, own_schedules, registered_schedules
from shardwise.spec.strategy import DIMENSIONS, Strategy
from shardwise.spec.training import FP8_BLOCK, OPTIMIZERS, RECIPES, Training

Uses = Callable[[Strategy, Training, Model], Any]
OfModel = Callable[[Model], Any]


def _schedule(name: str) -> Uses:
    return lambda s, t, m: (s.pp > 1) & (s.schedule == name)


def _context(method: str) -> Uses:
    return lambda s, t, m: (s.cp > 1) & (s.context_method == method)


def _training(field: str, value: str) -> Uses:
    return lambda s, t, m: getattr(t, field) == value


def _repeats(operator: str) -> Uses:
    """Whether selective recompute includes an operator."""
    return lambda s, t, m: (s.recompute == "selective") & (operator in s.recompute_operators)


def _has_dense_mlp(m: Model) -> bool:
    return m.moe is None or m.moe_layers < m.layers or m.moe.shared_ffn > 0


def _other_factors(m: Model) -> bool:
    """Whether longrope has another number of factors than a head has frequencies."""
    scaling = m.numerics.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return False
    return any(len(factors) != m.rotated_features // 2 for factors in (scaling.short_factors, scaling.long_factors))


def _uneven_kv(s: Strategy, t: Training, m: Model) -> bool:
    heads = max(1, (m.heads if m.mla else m.key_value_heads) // s.tp)
    return s.cp > 1 and heads % s.cp > 0 and s.cp % heads > 0


def _across_tp(s: Strategy) -> bool:
    """Whether the ranks that split an expert (neighbouring ranks) differ from the tensor-parallel group."""
    inside = [name for name in s.order if name != "pp"]
    before = inside[: inside.index("tp")]
    return s.expert_tensor_parallel != s.tp or any(s.degree(name) > 1 for name in before)


def _ragged(s: Strategy, t: Training, m: Model, unit: int = 16) -> Any:
    """Whether a side of a matmul of FP8, also of one that adds up over tokens, is not a multiple of ``unit``."""
    heads = (m.heads * m.query_key_dim // s.tp, -(-m.key_value_heads // s.tp) * m.query_key_dim)
    widths = (m.hidden, m.ffn // s.tp, *heads, s.microbatch * t.seq // s.cp)
    return reduce(or_, (width % unit > 0 for width in widths))


def _ragged_experts(s: Strategy, t: Training, m: Model) -> bool:
    """torch's grouped matmul: "strides should be multiple of 16 bytes"."""
    if m.moe is None:
        return False
    elements = 4 if t.precision == "fp32" else 8
    return any(width % elements for width in (m.hidden, m.moe.ffn // s.expert_tensor_parallel))


def _ragged_base(s: Strategy, t: Training, m: Model) -> Any:
    """Whether rows of a rank's part of a frozen matrix, or its blocks, are cut inside what shares a scale."""
    if t.base_precision not in ("fp8", "nf4", "nf4-double"):
        return False
    routed = m.mlp_matrices(m.moe.ffn) if m.moe else ()
    shared = m.mlp_matrices(m.moe.shared_ffn) if m.moe and m.moe.shared_ffn else ()
    dense = m.mlp_matrices(m.ffn) if m.moe is None or m.moe_layers < m.layers else ()
    over = [*((each, s.tp) for each in (*m.attention_matrices, *dense, *shared))]
    over += [(each, s.expert_tensor_parallel) for each in routed]
    if t.base_precision != "fp8":
        widths = [each.inputs // (degree if each.split == "row" else 1) for each, degree in over]
        return reduce(or_, (width % NF4_BLOCK > 0 for width in widths))
    sides = [
        (each.inputs if each.split == "row" else each.outputs, degree) for each, degree in over if each.split != "none"
    ]
    return reduce(or_, ((degree > 1) & (side // degree % FP8_BLOCK > 0) for side, degree in sides))


def _across_replicas(s: Strategy, t: Training, m: Model) -> Any:
    """Whether the ranks that share a layer's experts are of several replicas, of which some take other shares."""
    if s.dp_shares is None:
        return False
    inside = [name for name in s.order if name != "pp"]
    within = reduce(mul, (s.degree(name) for name in inside[: inside.index("dp")]), 1)
    return (m.moe is not None) & (s.expert_tensor_parallel * s.ep > within)


def _unlike_tied_ends(s: Strategy, t: Training, m: Model) -> bool:
    """Whether both ends of a pipeline hold the embedding, on ranks that do not stand opposite each other."""
    if not s.has_unlike_stages or not (m.tied_embeddings or m.mtp_layers > 0) or _ends_meet(s):
        return False
    first, last = s.of_stage(0), s.of_stage(s.pp - 1)
    return (first.tp, first.dp) != (last.tp, last.dp)


def _ends_meet(s: Strategy) -> Any:
    """Whether the first and the last stage are on one rank; by comparisons, as `in` cannot take columns."""
    return reduce(or_, (s.schedule == record.name for record in registered_schedules() if record.ends_meet))


# What the model alone decides: no layout and no training option changes it.
OF_MODEL: dict[str, OfModel] = {
    "experts": lambda m: m.moe is not None,
    "tied-embeddings": lambda m: m.tied_embeddings,
    "encoder": lambda m: not m.causal,
    "plain-attention": lambda m: m.mla is None,
    "mtp": lambda m: m.mtp_layers > 0,
    "other-norms": lambda m: m.counted is None and m.norms_per_layer not in ((1, 2) if m.parallel_block else (2, 4)),
    "wide-layer-norm": lambda m: m.qk_norm_whole and m.norm == "layernorm",
    "counted": lambda m: m.counted is not None,
    "delta-net": lambda m: m.delta is not None,
    "attention-gate": lambda m: m.attention_gate,
    "longrope": lambda m: m.numerics.rope_scaling is not None and m.numerics.rope_scaling.kind == "longrope",
    "other-factors": _other_factors,
    "bert-parts": lambda m: m.embedding_norm or m.token_types > 0 or m.pooler or m.mlm_head,
    "latent-sinks": lambda m: m.mla is not None and m.attention_sinks,
    "latent-qk-norm": lambda m: m.mla is not None and m.qk_norm,
    "latent-qkv-bias": lambda m: m.mla is not None and m.qkv_bias,
    "scaled-biased-head": lambda m: m.numerics.logit_scale != 1 and m.lm_head_bias,
    "odd-rotation": lambda m: m.positions == "rope" and (m.rotated_features % 2 == 1 or m.rotated_features == 0),
}


def _of_model(uses: OfModel) -> Uses:
    return lambda s, t, m: uses(m)


# Name → when a job uses it. Comparisons of the strategy's degrees and choices are joined by & and not by `and`, so
# that columns of a table may stand in for them.
TECHNIQUES: dict[str, Uses] = {
    # data
    "zero-0": lambda s, t, m: s.zero == 0,
    "zero-1": lambda s, t, m: s.zero == 1,
    "zero-2": lambda s, t, m: s.zero == 2,
    "zero-3": lambda s, t, m: (s.zero == 3) & (s.keep_parameters == 0),  # gathers again for the backward pass
    "zero-3-kept": lambda s, t, m: (s.zero == 3) & (s.keep_parameters == 1),
    "hybrid-shard": lambda s, t, m: (s.zero > 0) & (s.sharding_group < s.gradient_group),
    "no-dp-overlap": lambda s, t, m: (s.gradient_group > 1) & (s.overlap.dp == 0),
    "accumulate-local": lambda s, t, m: (s.zero >= 2) & (s.accumulate == "local"),
    "accumulate-sharded": lambda s, t, m: (s.zero >= 2) & (s.accumulate == "sharded"),
    "uneven-shares": lambda s, t, m: s.dp_shares is not None,
    "buckets": lambda s, t, m: s.bucket is not None,
    "compression": lambda s, t, m: s.compression.is_used,
    "compressed-momentum": lambda s, t, m: s.compression.compresses_momentum,
    "error-feedback": lambda s, t, m: s.compression.keeps_errors,
    "local-steps": lambda s, t, m: s.synchronise.is_local,
    "async": lambda s, t, m: s.synchronise.is_async,
    # tensor
    "tp": lambda s, t, m: s.tp > 1,
    "sp": lambda s, t, m: (s.tp > 1) & (s.sequence_parallel == 1),
    "tp-plain": lambda s, t, m: (s.tp > 1) & (s.sequence_parallel == 0),
    "tp-overlap": lambda s, t, m: (s.tp > 1) & (s.overlap.tp == 1),  # under the matmuls that need it
    "repeated-kv-heads": lambda s, t, m: (s.tp > m.key_value_heads) & (m.mla is None),
    # context
    "cp-ring": _context("ring"),
    "cp-all-gather": _context("all-gather"),
    "cp-ulysses": _context("ulysses"),
    "uneven-kv-heads": _uneven_kv,
    "odd-chunks": lambda s, t, m: (s.cp > 1) & (s.context_method != "ulysses") & (t.seq % (2 * s.cp) > 0),
    # experts
    "ep": lambda s, t, m: s.ep > 1,
    "ep-overlap": lambda s, t, m: (s.ep > 1) & (s.overlap.ep == 1),  # under other tokens' experts
    "expert-tp": lambda s, t, m: (m.moe is not None) & (s.expert_tensor_parallel > 1),
    "expert-tp-unlike-tp": lambda s, t, m: (
        (m.moe is not None) & (s.expert_tensor_parallel > 1) & (s.expert_tensor_parallel != s.tp)
    ),
    "experts-across-tp": lambda s, t, m: (m.moe is not None) & (s.expert_tensor_parallel > 1) & _across_tp(s),
    "experts-across-replicas": _across_replicas,
    "deduplicated-dispatch": lambda s, t, m: (s.ep > 1) & (s.dispatch == "deduplicated"),
    # pipeline
    "no-pipeline": lambda s, t, m: s.pp == 1,
    "pp": lambda s, t, m: s.pp > 1,
    **{record.name: _schedule(record.name) for record in own_schedules()},
    "odd-pipeline": lambda s, t, m: (s.pp > 1) & (s.pp % 2 == 1),
    "tied-ends-on-one-rank": lambda s, t, m: (s.pp > 1) & (m.tied_embeddings or m.mtp_layers > 0) & _ends_meet(s),
    "own-stages": lambda s, t, m: (s.pp > 1) & (s.stage_layers != "even"),
    "unlike-stages": lambda s, t, m: s.has_unlike_stages,
    "unlike-tied-ends": _unlike_tied_ends,
    "pp-overlap": lambda s, t, m: (s.pp > 1) & (s.overlap.pp == 1),
    # memory
    "recompute-selective": lambda s, t, m: s.recompute == "selective",
    "recompute-full": lambda s, t, m: s.recompute == "full",
    "recompute-of-some-layers": lambda s, t, m: (s.recompute == "full") & (s.recompute_layers is not None),
    "repeated-matmuls": _repeats("alternate-products"),
    "repeated-attention": lambda s, t, m: _repeats("attention")(s, t, m) & (t.attention == "unfused"),
    "repeated-up-projection": _repeats("up-projection"),
    "repeated-mlp-up": _repeats("mlp-up"),
    "repeated-experts": _repeats("experts"),
    "repeated-missing-mlp-up": lambda s, t, m: _repeats("mlp-up")(s, t, m) & (not _has_dense_mlp(m)),
    "offload-optimizer": lambda s, t, m: s.offload.optimizer > 0,
    "offload-gradients": lambda s, t, m: s.offload.gradients > 0,
    "offload-weights": lambda s, t, m: s.offload.weights > 0,
    "offload-activations": lambda s, t, m: s.offload.activations > 0,
    "offload-cpu": lambda s, t, m: s.offload.any & (s.offload.target == "cpu"),
    "offload-nvme": lambda s, t, m: s.offload.any & (s.offload.target == "nvme"),
    "no-offload-overlap": lambda s, t, m: s.offload.any & (s.overlap.offload == 0),
    "weights-beyond-optimizer": lambda s, t, m: s.offload.weights > s.offload.optimizer,
    "gradients-beyond-optimizer": lambda s, t, m: s.offload.gradients > s.offload.optimizer,
    # numbers
    **{name: _training("precision", name) for name in RECIPES},
    **{name: _training("optimizer", name) for name in OPTIMIZERS},
    "dropout": lambda s, t, m: t.dropout,
    "unfused-attention": _training("attention", "unfused"),
    "compile": lambda s, t, m: t.compile,
    # fine-tuning
    "adapters": lambda s, t, m: t.adapters is not None,
    "dora": lambda s, t, m: t.adapters is not None and t.adapters.method == "dora",
    "adapters-on-experts": lambda s, t, m: t.adapters is not None and t.adapters.experts,
    "adapter-dropout": lambda s, t, m: t.adapters is not None and t.adapters.dropout > 0,
    "frozen-parts": lambda s, t, m: len(t.trained) > 0,
    **{f"base-{name}": _training("base_precision", name) for name in BASE_FORMATS if name != "computed"},
    "ragged-base": _ragged_base,
    "reference-copy": lambda s, t, m: t.reference_copy,
    "dpo": _training("task", "dpo"),
    # model
    **{name: _of_model(uses) for name, uses in OF_MODEL.items()},
    "sliding-window": lambda s, t, m: m.sliding_window is not None and t.seq > m.sliding_window,
    "capped-scores": lambda s, t, m: m.numerics.attention_softcap is not None,
    "ragged-widths": _ragged,
    "ragged-blocks": lambda s, t, m: _ragged(s, t, m, FP8_BLOCK),
    "ragged-experts": _ragged_experts,
    # layout
    "rank-order": lambda s, t, m: s.order != DIMENSIONS,
    "named-collective": lambda s, t, m: s.collective not in ("auto", "textbook"),
    "in-network-collective": lambda s, t, m: s.collective in ("nvls", "sharp"),
}

# What no search of strategies varies: the model, the training, and how gradients are sent.
GIVEN: frozenset[str] = frozenset(
    (
        *(*OF_MODEL, *RECIPES, *OPTIMIZERS, "dropout", "unfused-attention", "compile", "sliding-window"),
        *("adapters", "dora", "adapters-on-experts", "adapter-dropout", "frozen-parts", "dpo", "reference-copy"),
        *(f"base-{name}" for name in BASE_FORMATS if name != "computed"),
        *("buckets", "compression", "compressed-momentum", "error-feedback", "local-steps", "async"),
        *("uneven-shares", "unlike-stages", "unlike-tied-ends"),
        *("named-collective", "in-network-collective"),
    )
)
# Which communication overlaps and how tokens are dispatched, which the stack decides.
OF_STACK: frozenset[str] = frozenset(
    ("tp-overlap", "ep-overlap", "deduplicated-dispatch", "pp-overlap", "no-dp-overlap", "no-offload-overlap")
)


def techniques() -> dict[str, Uses]:
    """`TECHNIQUES`, and the schedules of other packages."""
    return _with(other_schedules())


@lru_cache(maxsize=8)
def _with(others: tuple[ScheduleRecord, ...]) -> dict[str, Uses]:
    return {**TECHNIQUES, **{record.name: _schedule(record.name) for record in others}}

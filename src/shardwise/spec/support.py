"""What composes with what: the support matrix, by which the planner prunes and the engine refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from shardwise.spec import schedules
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.schedules import ScheduleRecord
from shardwise.spec.techniques import OF_MODEL, techniques
from shardwise.spec.training import OPTIMIZERS

# The matrix has every technique and every pair that does not simply run. What is not in it runs:
# `tests/engine/test_matrix_runs.py` checks what each technique alone changes in the engine. "Reproduced": run on stock
# PyTorch 2.13 against a single process; other frameworks' own checks are named.

# Best first. "needs": one option away from running; "priced only": our engine does not run it; "refused": it would
# fail, or compute something else.
Status = Literal["runs", "needs", "priced only", "refused"]
STATUSES: tuple[Status, ...] = ("runs", "needs", "priced only", "refused")


@dataclass(frozen=True)
class Finding:
    """Techniques that do not simply run together: how far they go, why, and what to do instead.

    ``field`` is the path in the job that a message names; its ``value`` makes a "needs" run.
    """

    techniques: tuple[str, ...]
    status: Status
    reason: str
    remedy: str
    field: str = "strategy"
    value: Any = None


def _each(
    names: str, status: Status, reason: str, remedy: str, field: str = "strategy", value: Any = None
) -> Iterator[Finding]:
    """The finding of every combination of ``names``: "a + b|c" is a with b, and a with c."""
    for combination in product(*(part.split("|") for part in names.split(" + "))):
        yield Finding(combination, status, reason, remedy, field, value)


def _of_schedules(records: tuple[ScheduleRecord, ...]) -> Iterator[Finding]:
    """What the facts of a schedule rule out."""
    for record in records:
        if record.two_copies:
            yield from _each(
                record.name, "priced only",
                "every rank holds two copies of its stages, which must be kept in sync; this engine does not",
                f"schedule: {record.instead}, about the same bubble with one copy",
            )  # fmt: skip
            instead = f"an even pp, or schedule: {record.instead}"
            yield from _each(f"{record.name} + odd-pipeline", "refused", f"{record.name} pairs its ranks", instead)
        elif not record.runs:
            yield from _each(record.name, "priced only", "this engine does not run it", f"schedule: {record.instead}")
        if record.splits_backward:  # the compiler makes one function of a layer's backward pass
            yield from _each(
                f"compile + {record.name}", "needs",
                "a compiled layer computes the gradients of its inputs and weights together",
                f"compile: false, or schedule: {schedules.chosen_chunks_schedules()[0]}", "training.compile", False,
            )  # fmt: skip


_FEWER_OPERATORS = (
    "recompute_operators: [norm, activation], or recompute: full",
    "strategy.recompute_operators",
    ("norm", "activation"),
)

MATRIX: tuple[Finding, ...] = (
    # Stock FSDP2 is silently wrong with any split backward pass and reshard_after_forward=True (reproduced: gradients
    # None or 1.4e-2 off; pytorch#144530 is the same for DDP). Ours is not: weight gradients need no gathered weights.
    *_each("zero-3 + tied-ends-on-one-rank", "needs",
           "the last stage reads the embedding that the first stage gathered and freed",
           "keep_parameters: true, or zero: 2", "strategy.keep_parameters", True),
    *_of_schedules(schedules.own_schedules()),
    # The ring merges blocks that are causal or whole by the log-sum-exp that a fused kernel returns.
    *_each("cp-ring + sliding-window", "needs", "the blocks of the ring are causal or whole, a window cuts across them",
           "context_method: all-gather or ulysses", "strategy.context_method", "all-gather"),
    *_each("cp-ring + dropout", "needs", "every block of the ring would need its own random state in the backward pass",
           "context_method: all-gather or ulysses", "strategy.context_method", "all-gather"),
    *_each("cp-ring + unfused-attention", "needs",
           "blocks are merged by the log-sum-exp that only the fused kernel returns",
           "attention: flash", "training.attention", "flash"),
    *_each("cp-all-gather + unfused-attention", "needs",
           "its backward pass starts from the log-sum-exp that only the fused kernel returns",
           "attention: flash, or context_method: ulysses", "training.attention", "flash"),
    *_each("capped-scores + cp-ring|cp-all-gather", "needs",
           "their kernels return the log-sum-exp of scores without a cap",
           "context_method: ulysses", "strategy.context_method", "ulysses"),
    *_each("longrope + cp-ring|cp-all-gather|cp-ulysses", "refused",
           "the longest position chooses the factors of longrope, and it differs between ranks", "cp: 1"),
    *_each("odd-chunks", "refused", "every rank holds an early and a late chunk of a sequence, to balance causal work",
           "a training.seq that is a multiple of 2·cp, or context_method: ulysses"),
    *_each("cp-ulysses + uneven-kv-heads", "refused",
           "the key-value heads of a rank neither divide over the context-parallel ranks nor repeat evenly",
           "a cp that divides them or is a multiple of them, or context_method: ring"),
    *_each("experts-across-tp + tp-plain", "needs",
           "the ranks that split an expert do not hold the same tokens, so sums over them would mix in other tokens",
           "sequence_parallel: true, or expert_tp: 1", "strategy.sequence_parallel", True),
    *_each("tp-overlap + fp8|fp8-delayed|fp8-rowwise|fp8-blockwise", "needs",
           "8-bit matmuls scale their whole input, which is there only once all of it is gathered",
           "overlap.tp: false, or precision: bf16", "strategy.overlap.tp", False),
    *_each("ep-overlap + deduplicated-dispatch", "priced only",
           "the second level of this exchange needs the result of the first: this engine overlaps plain exchanges",
           "dispatch: all-to-all, or overlap.ep: false", "strategy.overlap.ep"),
    *_each("ep-overlap + tp-plain", "needs",
           "without sequence parallelism, ranks that hold the same tokens split them before the exchange",
           "sequence_parallel: true, or overlap.ep: false", "strategy.sequence_parallel", True),
    *_each("pp-overlap", "priced only", "this engine does not overlap pipeline messages",
           "overlap.pp: false", "strategy.overlap.pp"),
    *_each("no-dp-overlap", "priced only", "this engine always overlaps gradient reduction and weight gathering",
           "overlap.dp: true", "strategy.overlap.dp"),
    *_each("no-offload-overlap", "priced only", "this engine always overlaps offload transfers",
           "overlap.offload: true", "strategy.overlap.offload"),
    *_each("tp-overlap + tp-plain", "needs",
           "only the all-gather and reduce-scatter of sequence parallelism can be split into pieces that overlap"
           " matmuls", "sequence_parallel: true, or overlap.tp: false", "strategy.sequence_parallel", True),
    # Newton-Schulz needs whole matrices: Liu et al. 2025, arXiv 2502.16982, section 2.3. Megatron-LM allows ZeRO-1.
    *_each("muon + zero-2|zero-3|zero-3-kept|tp|expert-tp", "priced only",
           "muon works on whole matrices and these are sharded; the gather it would need is neither priced nor run",
           "zero: 1 without tensor parallelism, or optimizer: adamw"),
    *_each("buckets|compression + zero-1|zero-2|zero-3|zero-3-kept", "needs",
           "gradients are summed in buckets, and compressed there, where every rank has all of them",
           "zero: 0, or neither bucket nor compression", "strategy.zero", 0),
    *_each("error-feedback + fp16", "needs", "the kept error has the loss scale of its step, which changes",
           "compression.error_feedback: false, or precision: bf16", "training.precision", "bf16"),
    *_each("compressed-momentum + " + "|".join(name for name in OPTIMIZERS if name != "adamw"), "needs",
           "1bit-adam compresses the momentum of AdamW",
           "optimizer: adamw, or another compression", "training.optimizer", "adamw"),
    *_each("compressed-momentum + fp16", "needs",
           "momentum is unscaled, but the gradients of a step carry the loss scale",
           "precision: bf16", "training.precision", "bf16"),
    *_each("compressed-momentum + offload-optimizer", "needs", "the momentum that is sent must be on the device",
           "offload.optimizer: 0", "strategy.offload.optimizer", 0.0),
    *_each("local-steps|async + zero-1|zero-2|zero-3|zero-3-kept", "needs",
           "workers that do not synchronise every step each hold all states", "zero: 0", "strategy.zero", 0),
    *_each("local-steps|async + compression|buckets", "needs",
           "no gradients are reduced within a step, so there is nothing to compress",
           "synchronise: every-step", "strategy.synchronise", "every-step"),
    *_each("local-steps|async + cp-ring|cp-all-gather|cp-ulysses|experts", "refused",
           "ranks that share sequences or experts synchronise every step and would need their own groups",
           "synchronise: every-step"),
    *_each("local-steps|async + fp16", "needs", "every worker would find its own loss scale",
           "precision: bf16", "training.precision", "bf16"),
    *_each("local-steps|async + offload-optimizer", "needs", "the weights that workers exchange must be on the device",
           "offload.optimizer: 0", "strategy.offload.optimizer", 0.0),
    # Collectives of every microbatch need equally many microbatches on all replicas.
    *_each("uneven-shares + zero-3", "needs", "replicas would gather weights unlike numbers of times",
           "zero: 1, or zero: 3 with keep_parameters: true and accumulate: local", "strategy.zero", 1),
    *_each("uneven-shares + accumulate-sharded", "needs",
           "gradients are reduced with every microbatch, and replicas have unlike numbers of them",
           "accumulate: local", "strategy.accumulate", "local"),
    *_each("uneven-shares + experts-across-replicas", "refused",
           "tokens are exchanged in every microbatch, and replicas have unlike numbers of them",
           "ep and expert_tp inside a replica, or no dp_shares", "strategy.dp_shares"),
    *_each("uneven-shares + local-steps|async", "refused", "the mean over workers would count unlike batches equally",
           "no dp_shares", "strategy.dp_shares"),
    *_each("uneven-shares + dualpipev", "needs",
           "with few microbatches its stages end in another order, which the replicas would have to agree on",
           f"schedule: {schedules.PLAIN}", "strategy.schedule", schedules.PLAIN),
    *_each("unlike-stages + local-steps|async", "refused", "a worker has no ranks of its own in every stage",
           "no stage_tp and stage_dp"),
    *_each("unlike-stages + deduplicated-dispatch", "needs",
           "its groups inside nodes are made by all stages alike",
           "dispatch: all-to-all", "strategy.dispatch", "all-to-all"),
    *_each("unlike-tied-ends", "refused",
           "the embedding's gradients at both ends are summed rank by rank, and the ends have unlike ranks",
           "the same tp and dp in the first and the last stage, or a schedule that has both on one rank"),
    *_each("fp8-delayed + compile", "needs", "maximum absolute values are recorded between kernels",
           "compile: false, or precision: fp8", "training.compile", False),
    # torch._scaled_mm: "Expected trailing dimension of mat1 to be divisible by 16".
    *_each("fp8|fp8-delayed|fp8-rowwise|mxfp8|nvfp4 + ragged-widths", "refused",
           "8-bit matmuls need widths, and tokens of a microbatch, that are multiples of 16 on every rank",
           "a smaller tp, another seq, or precision: bf16"),
    *_each("fp8-blockwise + ragged-blocks", "refused",
           "blocks of 128 need widths, and tokens of a microbatch, that are multiples of 128 on every rank",
           "a smaller tp, precision: fp8-rowwise, or bf16"),
    *_each("ragged-experts", "refused",
           "the grouped GEMM of experts needs rows of whole 16 bytes: features in multiples of 8 (of 4 in fp32)",
           "a smaller expert_tp, or other hidden and moe.ffn"),
    *_each("int8", "priced only", "this engine has no matmuls of integers; it would run bf16",
           "precision: bf16", "training.precision"),
    *_each("mxfp8|nvfp4", "priced only", "block-scaled matmuls need Blackwell, and this engine has none",
           "precision: bf16", "training.precision"),
    # DeepSpeed asks the same of offload_param (ZeRO-Infinity, arXiv 2104.07857).
    *_each("offload-weights + zero-0|zero-1|zero-2", "needs",
           "offloaded weights return layer by layer with ZeRO-3's all-gather", "zero: 3", "strategy.zero", 3),
    *_each("weights-beyond-optimizer", "needs", "the optimizer updates where its weights are",
           "offload.optimizer at least as large as offload.weights", "strategy.offload.optimizer", 1.0),
    *_each("offload-gradients + zero-0|zero-1", "needs",
           "unsharded gradients are accumulated and reduced on the device; those of ZeRO-2 leave once they are reduced",
           "zero: 2", "strategy.zero", 2),
    *_each("offload-gradients + accumulate-local", "needs",
           "unsharded gradients stay on the device until the last microbatch",
           "accumulate: sharded", "strategy.accumulate", "sharded"),
    *_each("offload-gradients + hybrid-shard", "priced only",
           "shards stay on the device until they are reduced across the groups, with the last microbatch",
           "shard_group: all data-parallel ranks, or offload.gradients: 0"),
    *_each("offload-optimizer + muon", "needs",
           "muon updates whole matrices: its states cannot be updated in pieces",
           "optimizer: adamw, or offload.optimizer: 0", "strategy.offload.optimizer", 0.0),
    *_each("offload-optimizer + adamw-bf16-moments|adam8bit", "needs", "offloaded states are updated in fp32",
           "optimizer: adamw, or offload.optimizer: 0", "strategy.offload.optimizer", 0.0),
    *_each("offload-activations + recompute-selective", "priced only",
           "what a selective recompute keeps is saved in its own hooks, which offload cannot reach",
           "recompute: full or none"),
    *_each("offload-activations + recompute-of-some-layers", "priced only",
           "the layer that stays for the loss would be one that keeps everything", "recompute_layers: null"),
    *_each("gradients-beyond-optimizer", "needs", "the optimizer updates where its gradients are",
           "offload.optimizer at least as large as offload.gradients", "strategy.offload.optimizer", 1.0),
    *_each("dropout", "priced only", "our attention kernels do not draw the same random numbers in every layout",
           "dropout: false", "training.dropout"),
    # PEFT refuses the first pair too (tuners/lora/layer.py, ParamWrapper); for the second it multiplies frozen weights
    # once more, by what is left of their inputs (tuners/lora/dora.py).
    *_each("adapter-dropout + adapters-on-experts", "priced only", "inputs of stacked experts are not dropped",
           "adapters.dropout: 0, or experts: false", "training.adapters.dropout"),
    *_each("adapter-dropout + dora", "priced only", "frozen weights would be multiplied by dropped inputs too",
           "adapters.dropout: 0, or method: lora", "training.adapters.dropout"),
    *_each("dora + adapters-on-experts", "priced only", "lengths of rows are not trained in stacked experts",
           "method: lora, or experts: false", "training.adapters.method"),
    *_each("dora + fp8|fp8-delayed|fp8-rowwise|fp8-blockwise", "priced only",
           "lengths are those of rows that are not rounded to FP8", "method: lora, or precision: bf16",
           "training.precision"),
    *_each("base-fp8|base-int8|base-nf4|base-nf4-double + fp8|fp8-delayed|fp8-rowwise|fp8-blockwise", "priced only",
           "weights are rounded to FP8 once, from 16 bits", "base_precision: computed, or precision: bf16",
           "training.precision"),
    *_each("adapters|frozen-parts + offload-weights", "priced only",
           "only weights that the optimizer updates leave the device", "offload.weights: 0",
           "strategy.offload.weights"),
    *_each("adapters|frozen-parts + muon", "priced only", "muon is for whole matrices that are all trained",
           "optimizer: adamw", "training.optimizer"),
    *_each("ragged-base", "refused",
           "blocks of weights that share a scale (64 of a row in NF4, 128 x 128 in FP8) stay whole on every rank",
           "a smaller tp, or base_precision: int8", "training.base_precision"),
    *_each("dora + base-fp8|base-nf4-double", "priced only",
           "lengths begin from rows whose scales other ranks may hold", "base_precision: nf4, or method: lora",
           "training.base_precision"),
    *_each("reference-copy", "priced only", "this engine's reference is the same weights, without adapters",
           "adapters, and nothing else trained", "training.preference"),
    *_each("dpo + mtp", "priced only", "answers are compared by the next token alone", "mtp_layers: 0",
           "model.mtp_layers"),
    *_each("dpo + local-steps|async", "refused", "the mean over workers would count unlike numbers of pairs equally",
           "synchronise: every-step"),
    *_each("in-network-collective", "priced only", "reduction inside switches has no schedule that this engine can run",
           "collective: auto, which lets the library use it", "strategy.collective"),
    # Selective recompute (Korthikanti et al. 2022, arXiv 2205.05198) runs again what a rank can compute by itself.
    *_each("repeated-matmuls + tp", "needs", "recomputed matmuls would repeat tensor-parallel communication",
           *_FEWER_OPERATORS),
    *_each("repeated-mlp-up + tp", "needs", "a recomputed matmul would gather its input over the ranks once more",
           *_FEWER_OPERATORS),
    *_each("repeated-experts", "priced only",
           "this engine runs a mixture of experts again with its whole layer alone", *_FEWER_OPERATORS[:2]),
    *_each("repeated-missing-mlp-up", "needs", "every MLP of the model is a routed expert", *_FEWER_OPERATORS),
    *_each("repeated-attention + cp-ulysses", "needs", "recomputed attention would repeat its all-to-alls",
           *_FEWER_OPERATORS),
    *_each("repeated-up-projection + plain-attention", "needs",
           "only latent attention has up-projections that can be recomputed on their own", *_FEWER_OPERATORS),
    # What our decoder does not build; a user's own module, under `parallelize`, may have it.
    *_each("counted", "priced only", "its code was counted, and decoders are built from a description",
           "shardwise.parallelize with the network itself", "model"),
    *_each("delta-net", "priced only", "gated delta nets are not built yet",
           "a model whose layers all attend, or shardwise.parallelize with the network itself", "model.delta"),
    *_each("attention-gate", "priced only", "gates of attention's output are not built yet",
           "attention_gate: false", "model.attention_gate"),
    *_each("other-norms", "priced only",
           "layers are built with two norms (before or after attention and MLP) or four, parallel ones with 1 or 2",
           "norms_per_layer: 2", "model.norms_per_layer"),
    *_each("wide-layer-norm", "priced only", "layer norms over the queries of all heads are not built",
           "norm: rmsnorm, or qk_norm_whole: false", "model.qk_norm_whole"),
    *_each("other-factors", "refused", "longrope has one factor for each pair of rotated features",
           "as many factors as half the rotated features", "model.numerics.rope_scaling.short_factors"),
    *_each("bert-parts", "priced only", "BERT-like encoders are not built",
           "a decoder such as gpt2", "model.embedding_norm"),
    *_each("latent-sinks", "priced only", "sinks are not built for latent attention",
           "attention_sinks: false", "model.attention_sinks"),
    *_each("latent-qk-norm", "priced only", "norms of queries and keys are not built for latent attention",
           "qk_norm: false", "model.qk_norm"),
    *_each("latent-qkv-bias", "priced only", "latent attention has no biases of queries, keys and values",
           "qkv_bias: false", "model.qkv_bias"),
    *_each("scaled-biased-head", "priced only", "logits are scaled before the head, which then has no bias",
           "lm_head_bias: false", "model.lm_head_bias"),
    *_each("odd-rotation", "refused", "rope rotates pairs of features, and a head has an odd number of them (or none)",
           "an even head size, or another numerics.rotary_share", "model.head_dim"),
)  # fmt: skip


def matrix() -> tuple[Finding, ...]:
    """`MATRIX`, and what it says of the schedules of other packages."""
    return _with(schedules.other_schedules())


@lru_cache(maxsize=8)
def _with(others: tuple[ScheduleRecord, ...]) -> tuple[Finding, ...]:
    return (*MATRIX, *_of_schedules(others))


@dataclass(frozen=True)
class Verdict:
    """Whether a job runs: the worst status of its findings, worst first; "runs" without any."""

    status: Status
    findings: tuple[Finding, ...] = ()


def verdict(job: Job) -> Verdict:
    """What keeps a job from running; never raises."""
    used = set(techniques_of(job))
    findings = [finding for finding in matrix() if used.issuperset(finding.techniques)]
    findings.sort(key=lambda finding: -STATUSES.index(finding.status))
    return Verdict(findings[0].status if findings else "runs", tuple(findings))


def not_built(model: Model) -> tuple[Finding, ...]:
    """The parts of a model that our decoder does not build; a user's own module may have them."""
    used = {name for name, uses in OF_MODEL.items() if uses(model)}
    return tuple(finding for finding in MATRIX if used.issuperset(finding.techniques))


def techniques_of(job: Job) -> tuple[str, ...]:
    """Names of the techniques that a job uses, in the order of `TECHNIQUES`."""
    if not job.strategy.has_unlike_stages:  # a page tries some hundred values at a time
        return tuple(name for name, uses in techniques().items() if uses(job.strategy, job.training, job.model))
    stages = [job.strategy, *map(job.strategy.of_stage, range(job.strategy.pp))]
    return tuple(
        name for name, uses in techniques().items() if any(uses(stage, job.training, job.model) for stage in stages)
    )

"""What composes with what: one table that the planner prunes by, the engine refuses by and the tests are made from.

`MATRIX` holds every single technique (of `techniques`) and every pair that does not simply run. What is not in it runs.
Sources: "reproduced" was run on stock PyTorch 2.13 against a single process; other frameworks' own checks are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from shardwise.spec.job import Job
from shardwise.spec.strategy import SCHEDULES
from shardwise.spec.techniques import SPLIT_BACKWARD, TECHNIQUES
from shardwise.spec.training import OPTIMIZERS

# Best first. "needs": one option away from running; "priced only": no engine of ours runs it now; "refused": it would
# fail, or compute something else.
Status = Literal["runs", "needs", "priced only", "refused"]
STATUSES: tuple[Status, ...] = ("runs", "needs", "priced only", "refused")


@dataclass(frozen=True)
class Finding:
    """A set of techniques that does not simply run together: how far it goes, why, and what to do instead.

    ``option`` is the field of the job (dotted path) and the value that make a "needs" run.
    """

    techniques: tuple[str, ...]
    status: Status
    reason: str
    remedy: str
    option: tuple[str, Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether a job runs: the worst status of its findings, worst first; "runs" without any."""

    status: Status
    findings: tuple[Finding, ...] = ()


def verdict(job: Job) -> Verdict:
    """What stands between a job and its run; never raises."""
    used = set(techniques_of(job))
    found = [one for one in MATRIX if used.issuperset(one.techniques)]
    found.sort(key=lambda one: -STATUSES.index(one.status))
    return Verdict(found[0].status if found else "runs", tuple(found))


def techniques_of(job: Job) -> tuple[str, ...]:
    """Names of the techniques that a job uses, in the order of `TECHNIQUES`."""
    return tuple(name for name, uses in TECHNIQUES.items() if uses(job.strategy, job.training, job.model))


def between(*techniques: str) -> Finding:
    """What the table says of just these techniques together, in any order; "runs" where it is silent."""
    names = set(techniques)
    silent = Finding(techniques, "runs", "", "")
    return next((one for one in MATRIX if set(one.techniques) == names), silent)


def forbidden_pairs(statuses: Iterable[Status] = ("needs", "refused")) -> tuple[tuple[str, str], ...]:
    """Pairs of techniques that a search leaves out; a technique that does not run at all is paired with itself.

    With "priced only" among ``statuses``: also what no engine of ours runs.
    """
    wanted = set(statuses)
    return tuple((one.techniques[0], one.techniques[-1]) for one in MATRIX if one.status in wanted)


def _each(
    first: tuple[str, ...],
    second: tuple[str, ...],
    status: Status,
    reason: str,
    remedy: str,
    option: tuple[str, Any] | None = None,
) -> tuple[Finding, ...]:
    """The same finding for every one of ``first`` with every one of ``second``."""
    return tuple(Finding(pair, status, reason, remedy, option) for pair in product(first, second))


MATRIX: tuple[Finding, ...] = (
    # Stock FSDP2 is silently wrong with any split backward pass and reshard_after_forward=True (reproduced: gradients
    # None or 1.4e-2 off; pytorch#144530 is the same for DDP). Ours is not: weight gradients need no gathered weights.
    Finding(
        ("zero-3", "tied-ends-on-one-rank"), "needs",
        "the head of the last stage reads the embedding that the first stage has gathered, and let go",
        "keep_parameters: true, or zero: 2", ("strategy.keep_parameters", True),
    ),
    Finding(
        ("dualpipe",), "priced only",
        "every rank holds two copies of its stages, which have to be kept equal; no engine of ours does",
        "schedule: dualpipev, about the same bubble with one copy",
    ),
    Finding(
        ("dualpipe", "odd-pipeline"), "refused", "dualpipe pairs its ranks", "an even pp, or schedule: dualpipev",
    ),
    # Multi-token prediction reads the embedding on the last stage.
    Finding(
        ("mtp", "pp"), "priced only", "the extra layers read the embedding of the first stage on the last one",
        "pp: 1, or mtp_layers: 0",
    ),
    # The ring merges blocks that are causal or whole by the log-sum-exp that a fused kernel returns.
    Finding(
        ("cp-ring", "sliding-window"), "needs", "the blocks of the ring are causal or whole, a window cuts across them",
        "context_method: all-gather or ulysses", ("strategy.context_method", "all-gather"),
    ),
    Finding(
        ("cp-ring", "dropout"), "needs", "every block of the ring would need its own random state in the backward pass",
        "context_method: all-gather or ulysses", ("strategy.context_method", "all-gather"),
    ),
    Finding(
        ("cp-ring", "unfused-attention"), "needs",
        "blocks are merged by the log-sum-exp that only the fused kernel returns",
        "attention: flash", ("training.attention", "flash"),
    ),
    Finding(
        ("cp-all-gather", "unfused-attention"), "needs",
        "its backward pass starts from the log-sum-exp that only the fused kernel returns",
        "attention: flash, or context_method: ulysses", ("training.attention", "flash"),
    ),
    Finding(
        ("odd-chunks",), "refused",
        "every rank holds an early and a late chunk of a sequence, so that causal work is even",
        "a training.seq that is a multiple of 2·cp, or context_method: ulysses",
    ),
    Finding(
        ("cp-ulysses", "uneven-kv-heads"), "refused",
        "the key-value heads of a rank neither divide over the context-parallel ranks nor repeat evenly",
        "a cp that divides them or is a multiple of them, or context_method: ring",
    ),
    Finding(
        ("experts-across-tp", "tp-plain"), "needs",
        "the ranks that split an expert are not those that hold the same tokens, so sums over them would mix others in",
        "sequence_parallel: true, or expert_tp: 1", ("strategy.sequence_parallel", True),
    ),
    Finding(
        ("tp-overlap", "tp-plain"), "needs",
        "only the all-gather and reduce-scatter of sequence parallelism can be cut into pieces under the products",
        "sequence_parallel: true, or overlap.tp: false", ("strategy.sequence_parallel", True),
    ),
    *_each(
        ("ep-overlap",), ("no-pipeline", *(name for name in SCHEDULES if not name.startswith("dualpipe"))), "needs",
        "the exchange hides only under another microbatch's computation, which dualpipev runs beside it",
        "schedule: dualpipev, or overlap.ep: false", ("strategy.overlap.ep", False),
    ),
    # Newton-Schulz needs whole matrices: Liu et al. 2025, arXiv 2502.16982, section 2.3. Megatron-LM allows ZeRO-1.
    *_each(
        ("muon",), ("zero-2", "zero-3", "zero-3-kept", "tp", "expert-tp"), "priced only",
        "muon works on whole matrices and these are cut; the gather it takes is neither priced nor run",
        "zero: 1 without tensor parallelism, or optimizer: adamw",
    ),
    *_each(
        ("buckets", "compression"), ("zero-1", "zero-2", "zero-3", "zero-3-kept"), "needs",
        "gradients are summed in buckets, and compressed there, where every rank has all of them",
        "zero: 0, or neither bucket nor compression", ("strategy.zero", 0),
    ),
    Finding(
        ("error-feedback", "fp16"), "needs",
        "what is kept of a gradient is in the scale of the loss of its step, which changes",
        "compression.error_feedback: false, or precision: bf16", ("training.precision", "bf16"),
    ),
    *_each(
        ("compressed-momentum",), tuple(name for name in OPTIMIZERS if name != "adamw"), "needs",
        "1bit-adam compresses the momentum of AdamW", "optimizer: adamw, or another compression",
        ("training.optimizer", "adamw"),
    ),
    Finding(
        ("compressed-momentum", "fp16"), "needs",
        "momentum is without the scale of the loss, which the gradients of a step have", "precision: bf16",
        ("training.precision", "bf16"),
    ),
    Finding(
        ("compressed-momentum", "offload-optimizer"), "needs", "the momentum that travels is on the device",
        "offload.optimizer: 0", ("strategy.offload.optimizer", 0.0),
    ),
    *_each(
        ("local-steps", "async"), ("zero-1", "zero-2", "zero-3", "zero-3-kept"), "needs",
        "workers that do not meet in every step have all states themselves", "zero: 0", ("strategy.zero", 0),
    ),
    *_each(
        ("local-steps", "async"), ("compression", "buckets"), "needs",
        "there are no sums of gradients in a step that could be made smaller", "synchronise: every-step",
        ("strategy.synchronise", "every-step"),
    ),
    *_each(
        ("local-steps", "async"), ("cp-ring", "cp-all-gather", "cp-ulysses", "experts"), "refused",
        "ranks that share sequences or experts meet in every step, and would need groups apart from those of workers",
        "synchronise: every-step",
    ),
    *_each(
        ("local-steps", "async"), ("fp16",), "needs", "every worker would find a scale of the loss of its own",
        "precision: bf16", ("training.precision", "bf16"),
    ),
    *_each(
        ("local-steps", "async"), ("offload-optimizer",), "needs",
        "the weights that workers exchange are on the device", "offload.optimizer: 0",
        ("strategy.offload.optimizer", 0.0),
    ),
    # torch._scaled_mm: "Expected trailing dimension of mat1 to be divisible by 16".
    Finding(
        ("fp8", "ragged-widths"), "refused", "8-bit products take widths that are multiples of 16 on every rank",
        "a smaller tp, or precision: bf16",
    ),
    Finding(
        ("ragged-experts",), "refused",
        "the grouped product of experts takes rows of whole 16 bytes: features in multiples of 8 (of 4 in fp32)",
        "a smaller expert_tp, or other hidden and moe.ffn",
    ),
    # The compiler makes one function of a layer's backward pass.
    *_each(
        ("compile",), SPLIT_BACKWARD, "needs",
        "a compiled layer computes the gradients of its inputs and weights together",
        "compile: false, or schedule: interleaved", ("training.compile", False),
    ),
    *(
        Finding(
            (name,), "priced only", "block-scaled products need Blackwell, and no engine of ours computes in them",
            "precision: fp8 or bf16",
        )
        for name in ("mxfp8", "nvfp4")
    ),
    # DeepSpeed asks the same of offload_param (ZeRO-Infinity, arXiv 2104.07857).
    *_each(
        ("offload-weights",), ("zero-0", "zero-1", "zero-2"), "needs",
        "weights come back layer by layer with the gather of ZeRO-3", "zero: 3", ("strategy.zero", 3),
    ),
    Finding(
        ("weights-beyond-optimizer",), "needs", "the optimizer updates where its weights are",
        "offload.optimizer at least as large as offload.weights", ("strategy.offload.optimizer", 1.0),
    ),
    *_each(
        ("offload-gradients",), ("zero-0", "zero-1"), "needs",
        "whole gradients are added up on the device, where they are summed; those of ZeRO-2 leave as they are reduced",
        "zero: 2", ("strategy.zero", 2),
    ),
    Finding(
        ("offload-gradients", "accumulate-local"), "needs",
        "whole gradients stay on the device until the last microbatch", "accumulate: sharded",
        ("strategy.accumulate", "sharded"),
    ),
    Finding(
        ("offload-gradients", "hybrid-shard"), "priced only",
        "shards stay on the device until they are summed over the groups, with the last microbatch",
        "shard_group: all data-parallel ranks, or offload.gradients: 0",
    ),
    Finding(
        ("offload-optimizer", "muon"), "needs", "muon moves whole matrices: its states cannot be updated in pieces",
        "optimizer: adamw, or offload.optimizer: 0", ("strategy.offload.optimizer", 0.0),
    ),
    *_each(
        ("offload-activations",), ("recompute-full", "recompute-selective", "compile"), "priced only",
        "the layers keep their inputs in hooks of their own, which no others can reach", "one of the two",
    ),
    Finding(
        ("gradients-beyond-optimizer",), "needs", "the optimizer updates where its gradients are",
        "offload.optimizer at least as large as offload.gradients", ("strategy.offload.optimizer", 1.0),
    ),
    Finding(
        ("dropout",), "priced only", "no attention kernel of ours draws the same random numbers in every layout",
        "dropout: false",
    ),
    Finding(
        ("in-network-collective",), "priced only", "the switches' own reduction has no schedule for us to run",
        "collective: auto, which lets the library use it",
    ),
)  # fmt: skip

__all__ = [
    "MATRIX", "SPLIT_BACKWARD", "STATUSES", "TECHNIQUES", "Finding", "Status", "Verdict",
    "between", "forbidden_pairs", "techniques_of", "verdict",
]  # fmt: skip

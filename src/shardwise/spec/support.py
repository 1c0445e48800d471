"""What composes with what: one table that the planner prunes by, the engine refuses by and the tests are made from.

`TECHNIQUES` says which techniques there are and when a job uses one; `MATRIX` holds every single technique and every
pair that does not simply run. What is not in it runs. Sources: "reproduced" was run on stock PyTorch 2.13 against a
single process; other frameworks' own checks are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import DIMENSIONS, SCHEDULES, Strategy
from shardwise.spec.training import OPTIMIZERS, RECIPES, Training

# Best first. "needs": one option away from running; "priced only": no engine of ours runs it now; "refused": it would
# fail, or compute something else.
Status = Literal["runs", "needs", "priced only", "refused"]
STATUSES: tuple[Status, ...] = ("runs", "needs", "priced only", "refused")
Uses = Callable[[Strategy, Training, Model], Any]


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


def _schedule(name: str) -> Uses:
    return lambda s, t, m: (s.pp > 1) & (s.schedule == name)


def _context(method: str) -> Uses:
    return lambda s, t, m: (s.cp > 1) & (s.context_method == method)


def _precision(name: str) -> Uses:
    return lambda s, t, m: t.precision == name


def _optimizer(name: str) -> Uses:
    return lambda s, t, m: t.optimizer == name


def _kv_heads_per_rank(s: Strategy, m: Model) -> int:
    heads = m.heads if m.mla else m.key_value_heads
    return max(1, heads // s.tp)


def _uneven_kv(s: Strategy, m: Model) -> bool:
    heads = _kv_heads_per_rank(s, m)
    return s.cp > 1 and heads % s.cp > 0 and s.cp % heads > 0


def _across_tp(s: Strategy) -> bool:
    """Whether the ranks that split an expert are others than the tensor-parallel group: those next to each other."""
    inside = [name for name in s.order if name != "pp"]
    before = inside[: inside.index("tp")]
    return s.expert_tensor_parallel != s.tp or any(s.degree(name) > 1 for name in before)


def _ragged(s: Strategy, m: Model) -> bool:
    widths = (m.hidden, m.ffn // s.tp, m.moe.ffn // s.expert_tensor_parallel if m.moe else 0)
    return any(width % 16 for width in widths)


# Schedules that compute the gradients of the weights apart from those of the inputs.
SPLIT_BACKWARD = tuple(name for name in SCHEDULES if name not in ("gpipe", "1f1b", "interleaved"))

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
    "accumulate-local": lambda s, t, m: (s.zero >= 2) & (s.accumulate == "local"),
    # tensor
    "tp": lambda s, t, m: s.tp > 1,
    "sp": lambda s, t, m: (s.tp > 1) & (s.sequence_parallel == 1),
    "tp-plain": lambda s, t, m: (s.tp > 1) & (s.sequence_parallel == 0),
    "tp-overlap": lambda s, t, m: (s.tp > 1) & (s.overlap.tp == 1),
    "repeated-kv-heads": lambda s, t, m: (s.tp > m.key_value_heads) & (m.mla is None),
    # context
    "cp-ring": _context("ring"),
    "cp-all-gather": _context("all-gather"),
    "cp-ulysses": _context("ulysses"),
    "uneven-kv-heads": lambda s, t, m: _uneven_kv(s, m),
    "odd-chunks": lambda s, t, m: (s.cp > 1) & (s.context_method != "ulysses") & (t.seq % (2 * s.cp) > 0),
    # experts
    "ep": lambda s, t, m: s.ep > 1,
    "ep-overlap": lambda s, t, m: (s.ep > 1) & (s.overlap.ep == 1),
    "expert-tp": lambda s, t, m: (m.moe is not None) & (s.expert_tensor_parallel > 1),
    "expert-tp-unlike-tp": lambda s, t, m: (
        (m.moe is not None) & (s.expert_tensor_parallel > 1) & (s.expert_tensor_parallel != s.tp)
    ),
    "experts-across-tp": lambda s, t, m: (m.moe is not None) & (s.expert_tensor_parallel > 1) & _across_tp(s),
    "deduplicated-dispatch": lambda s, t, m: (s.ep > 1) & (s.dispatch == "deduplicated"),
    # pipeline
    "no-pipeline": lambda s, t, m: s.pp == 1,
    "pp": lambda s, t, m: s.pp > 1,
    **{name: _schedule(name) for name in SCHEDULES},
    "odd-pipeline": lambda s, t, m: (s.pp > 1) & (s.pp % 2 == 1),
    "own-stages": lambda s, t, m: (s.pp > 1) & (s.stage_layers != "even"),
    # memory
    "recompute-selective": lambda s, t, m: s.recompute == "selective",
    "recompute-full": lambda s, t, m: s.recompute == "full",
    "offload-optimizer": lambda s, t, m: s.offload.optimizer > 0,
    "offload-gradients": lambda s, t, m: s.offload.gradients > 0,
    "offload-weights": lambda s, t, m: s.offload.weights > 0,
    "offload-activations": lambda s, t, m: s.offload.activations > 0,
    "offload-cpu": lambda s, t, m: s.offload.any & (s.offload.target == "cpu"),
    "offload-nvme": lambda s, t, m: s.offload.any & (s.offload.target == "nvme"),
    "gradients-beyond-optimizer": lambda s, t, m: s.offload.gradients > s.offload.optimizer,
    # numbers
    **{name: _precision(name) for name in RECIPES},
    **{name: _optimizer(name) for name in OPTIMIZERS},
    "dropout": lambda s, t, m: t.dropout,
    "unfused-attention": lambda s, t, m: t.attention == "unfused",
    # model
    "tied-embeddings": lambda s, t, m: m.tied_embeddings,
    "mtp": lambda s, t, m: m.mtp_layers > 0,
    "encoder": lambda s, t, m: not m.causal,
    "sliding-window": lambda s, t, m: m.sliding_window is not None and t.seq > m.sliding_window,
    "ragged-widths": lambda s, t, m: _ragged(s, m),
    # layout
    "rank-order": lambda s, t, m: s.order != DIMENSIONS,
    "named-collective": lambda s, t, m: s.collective not in ("auto", "textbook"),
    "in-network-collective": lambda s, t, m: s.collective in ("nvls", "sharp"),
}


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
    # Reproduced: gradients None or 1.4e-2 off with reshard_after_forward=True and ZBV, interleaved zero bubble or
    # DualPipeV, 1.3e-8 with False; 1F1B and interleaved are right either way. pytorch#144530 is the same for DDP.
    *_each(
        ("zero-3",), SPLIT_BACKWARD, "needs",
        "FSDP frees the gathered weights before the split backward pass reads them: wrong gradients, no error",
        "keep_parameters: true, or zero: 2",
        ("strategy.keep_parameters", True),
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
        ("odd-chunks",), "refused",
        "every rank holds an early and a late chunk of a sequence, so that causal work is even",
        "a training.seq that is a multiple of 2·cp, or context_method: ulysses",
    ),
    Finding(
        ("cp-ulysses", "uneven-kv-heads"), "refused",
        "the key-value heads of a rank neither divide over the context-parallel ranks nor repeat evenly",
        "a cp that divides them or is a multiple of them, or context_method: ring",
    ),
    # Megatron-LM raises: "When using expert parallelism and tensor parallelism, sequence parallelism must be used".
    Finding(
        ("ep", "tp-plain"), "needs", "every tensor-parallel rank would send the same tokens to the experts",
        "sequence_parallel: true", ("strategy.sequence_parallel", True),
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
    # torch._scaled_mm: "Expected trailing dimension of mat1 to be divisible by 16".
    Finding(
        ("fp8", "ragged-widths"), "refused", "8-bit products take widths that are multiples of 16 on every rank",
        "a smaller tp, or precision: bf16",
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

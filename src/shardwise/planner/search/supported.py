"""What a search leaves out: the support matrix (`spec.support`), applied to jobs and to the cells of a price table.

The values of a cell's fields are read off the axes of the table, without making the strategies of all cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardwise.cost.sweep.columns import Group, LayerChoice, RecomputeChoice, ScheduleChoice, ShardChoice
from shardwise.cost.sweep.price import TableBlock, TablePiece
from shardwise.planner.constraints import Allowed, has
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.schedules import job_schedules
from shardwise.spec.strategy import Offload, Strategy
from shardwise.spec.support import Finding, matrix, not_built, techniques_of, verdict
from shardwise.spec.techniques import GIVEN, OF_STACK, techniques

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


_CHOICES = (LayerChoice, ScheduleChoice, RecomputeChoice, ShardChoice)
_CHOSEN_FIELDS = frozenset(("offload", *(field.name for choice in _CHOICES for field in fields(choice))))


def _variants(base: Strategy, choices: Sequence[Any]) -> list[Strategy]:
    return [base.unchecked(**vars(choice)) for choice in choices]


class CellBook:
    """Caches what ``of_block`` returns for the rows and columns of each block; successive pieces share blocks."""

    def __init__(self, of_block: Callable[[TableBlock], tuple[Array, Array]]) -> None:
        self._of_block = of_block
        self._last: tuple[Sequence[TableBlock], tuple[Array, Array, Array]] | None = None

    def of(self, piece: TablePiece) -> tuple[Array, Array]:
        """The values by row of the piece, and by column × block (`TablePiece.block_of_row`)."""
        if self._last is None or self._last[0] is not piece.blocks:
            self._last = (piece.blocks, self._of_blocks(piece.blocks))
        rows, columns, starts = self._last[1]
        return rows[starts[piece.block_of_row] + piece.row_numbers], columns

    def _of_blocks(self, blocks: Sequence[TableBlock]) -> tuple[Array, Array, Array]:
        """The values of all rows, by column × block, and where each block's rows start."""
        import numpy as np

        rows, columns = zip(*(self._of_block(block) for block in blocks))
        starts = np.cumsum([0, *(len(block.rows) for block in blocks[:-1])])
        return np.concatenate(rows), np.stack(columns, axis=-1), starts


class Mask:
    """The cells that have an allowed value in every field of ``entry``.

    ``idle`` says whether a field without effect matches, such as a context method without context parallelism.
    """

    def __init__(self, entry: Mapping[str, Allowed], *, idle: bool) -> None:
        self._entry, self._idle = entry, idle
        self._book = CellBook(self._of_block)

    def cells(self, piece: TablePiece) -> Array | None:
        """Whether each cell matches, by column × row; None if none does."""
        if "offload" in self._entry and piece.offload not in self._entry["offload"]:
            return None
        rows, columns = self._book.of(piece)
        if not rows.any():
            return None
        mask: Array = columns.take(piece.block_of_row, -1) & rows
        return mask

    def _of_block(self, block: TableBlock) -> tuple[Array, Array]:
        """Which rows and which columns of a block match their fields."""
        import numpy as np

        group, index, base = block.group, block.rows.index.T, block.group.base

        def matches(strategy: Strategy, names: Iterable[str]) -> bool:
            return all(has(strategy, name, self._entry[name], idle=self._idle) for name in names)

        def matching(choices: Sequence[Any]) -> Array:
            asked = [name for name in vars(choices[0]) if name in self._entry]
            return np.array([matches(strategy, asked) for strategy in _variants(base, choices)])

        here = matches(base, (name for name in self._entry if name not in _CHOSEN_FIELDS))
        rows = matching(group.layers)[index[:, 0]] & matching(group.schedules)[index[:, 1]]
        return rows & matching(group.recomputes)[index[:, 2]] & here, matching(group.shards)[block.columns.numbers]


# The techniques that each choice of a table decides; all others follow from the degrees, the model or the training.
# Those of a layer also read tp, cp and the experts' degrees, those of a schedule pp, and those of shards cp·dp.
_LAYER = ("sp", "tp-plain", "cp-ring", "cp-all-gather", "cp-ulysses", "uneven-kv-heads", "odd-chunks", "ragged-widths",
          "ragged-blocks")  # fmt: skip
_SCHEDULE = ("own-stages", "tied-ends-on-one-rank")  # and its name
_RECOMPUTE = ("recompute-selective", "recompute-full", "recompute-of-some-layers", "repeated-matmuls",
              "repeated-attention", "repeated-up-projection", "repeated-mlp-up", "repeated-experts",
              "repeated-missing-mlp-up")  # fmt: skip
_SHARDS = ("zero-0", "zero-1", "zero-2", "zero-3", "zero-3-kept", "hybrid-shard", "accumulate-local")
_OFFLOAD = ("offload-optimizer", "offload-gradients", "offload-weights", "offload-activations", "offload-cpu",
            "offload-nvme", "no-offload-overlap", "weights-beyond-optimizer", "gradients-beyond-optimizer")  # fmt: skip


def not_built_here(job: Job) -> tuple[Finding, ...]:
    """What our engine lacks of the job's model, if the job is for our engine."""
    if not job.stack.is_own:
        return ()
    return tuple(finding for finding in not_built(job.model) if finding.status == "priced only")


def offers_priced(job: Job, any_priced: bool) -> bool:
    """Whether a search also offers what is priced only: if asked to, or if no strategy of the model runs."""
    return any_priced or bool(not_built_here(job))


def rows_against(job: Job, *, any_priced: bool = False) -> tuple[Finding, ...]:
    """The rows of the matrix by which a search leaves strategies of a job out.

    "Priced only" is about our engine: on another stack such a row counts only if it names a choice of the search.
    """
    if offers_priced(job, any_priced):
        return tuple(finding for finding in matrix() if finding.status != "priced only")
    if job.stack.is_own:
        return matrix()
    ours_alone = GIVEN | OF_STACK
    return tuple(
        finding
        for finding in matrix()
        if finding.status != "priced only" or not ours_alone.issuperset(finding.techniques)
    )


def require_offered(job: Job, *, any_priced: bool = False) -> None:
    """Raises SpecError if every strategy is left out because of something that no search varies."""
    used = set(techniques_of(job))
    for finding in rows_against(job, any_priced=any_priced):
        if GIVEN.issuperset(finding.techniques) and used.issuperset(finding.techniques):
            priced = ", or ⟨any_priced=true⟩ for a price alone" if finding.status == "priced only" else ""
            raise SpecError(
                finding.field, f"{' with '.join(finding.techniques)}: {finding.reason}", finding.remedy + priced
            )


def model_note(job: Job) -> str | None:
    """A note for a model of which our engine runs no strategy, so that all are priced only."""
    lacking = not_built_here(job)
    if not lacking:
        return None
    reasons = "; ".join(f"{finding.reason} ({finding.remedy} would run)" for finding in lacking)
    return f"this project's engine does not run {job.model.name}: {reasons}. These are prices for engines that do."


class Supported:
    """Tells which cells of a piece run; ``any_priced`` also lets through what is priced only."""

    def __init__(self, job: Job, *, any_priced: bool = False) -> None:
        self.job = job
        self._techniques = techniques()
        findings = [finding for finding in rows_against(job, any_priced=any_priced) if self._may_hold(finding)]
        named = dict.fromkeys(name for finding in findings for name in finding.techniques)
        self._bit = {name: 1 << number for number, name in enumerate(named)}
        assert len(self._bit) < 63, "more techniques than bits"
        of_axis = {LayerChoice: _LAYER, ScheduleChoice: (*job_schedules(), *_SCHEDULE), RecomputeChoice: _RECOMPUTE,
                   ShardChoice: _SHARDS, Offload: _OFFLOAD}  # fmt: skip
        chosen = frozenset(name for names in of_axis.values() for name in names)
        self._named: dict[type[Any] | None, tuple[str, ...]] = {
            axis: tuple(name for name in names if name in self._bit) for axis, names in of_axis.items()
        }
        self._named[None] = tuple(name for name in self._bit if name not in chosen)
        self._masks = [self._bits_of(finding.techniques) for finding in findings]
        self._book = CellBook(self._block_bits)
        self._of_offload: dict[Offload, int] = {}
        self._of_group: dict[int, tuple[Group, tuple[Any, ...]]] = {}
        self._of_choices: dict[tuple[Any, ...], Array] = {}

    def _may_hold(self, finding: Finding) -> bool:
        """Whether a row is about the model and training of the job, which no search changes."""
        fixed = (name for name in finding.techniques if name in GIVEN)
        return all(self._techniques[name](self.job.strategy, self.job.training, self.job.model) for name in fixed)

    def allowed(self, piece: TablePiece) -> Array | None:
        """Whether each cell runs, by column × row; None if all do."""
        import numpy as np

        rows, columns = self._book.of(piece)
        offload = self._offload_bits(piece.offload)
        everything = int(np.bitwise_or.reduce(rows)) | int(np.bitwise_or.reduce(columns, axis=None)) | offload
        masks = [mask for mask in self._masks if mask & everything == mask]
        if not masks:
            return None
        bits = columns.take(piece.block_of_row, -1) | (rows | offload)
        forbidden = np.zeros(bits.shape, dtype=bool)
        for mask in masks:
            forbidden |= (bits & mask) == mask
        allowed: Array = ~forbidden
        return allowed

    def _block_bits(self, block: TableBlock) -> tuple[Array, Array]:
        """Bits of the rows, and of the columns, of a block."""
        base, layers, schedules, recomputes, shards = self._group_bits(block.group)
        layer, schedule, recompute = block.rows.index
        rows = base | layers[layer] | schedules[schedule] | recomputes[recompute]
        return rows, shards[block.columns.numbers]

    def _group_bits(self, group: Group) -> tuple[Any, ...]:
        """Bits of what all strategies of a group share, and of the choices of each axis."""
        known = self._of_group.get(id(group))
        if known is None or known[0] is not group:
            known = self._of_group[id(group)] = (group, self._new_group_bits(group))
        return known[1]

    def _new_group_bits(self, group: Group) -> tuple[Any, ...]:
        base, of_axis = group.base, self._named
        return (
            self._used(base, of_axis[None]),
            self._bits(base, LayerChoice, group.layers, base.tp, base.cp, base.ep, base.expert_tp),
            self._bits(base, ScheduleChoice, group.schedules, base.pp),
            self._bits(base, RecomputeChoice, group.recomputes),
            self._bits(base, ShardChoice, group.shards, base.gradient_group),
        )

    def _bits(self, base: Strategy, axis: type[Any], choices: Sequence[Any], *degrees: int | None) -> Array:
        """By choice; ``degrees``: what else the techniques of this axis read of a strategy."""
        import numpy as np

        key = (axis, choices, *degrees)
        known = self._of_choices.get(key)  # long to hash
        if known is None:
            bits = [self._used(strategy, self._named[axis]) for strategy in _variants(base, choices)]
            known = self._of_choices[key] = np.array(bits, dtype=np.int64)
        return known

    def _used(self, strategy: Strategy, names: tuple[str, ...]) -> int:
        job = self.job
        return self._bits_of(n for n in names if self._techniques[n](strategy, job.training, job.model))

    def _bits_of(self, names: Iterable[str]) -> int:
        return sum(self._bit[name] for name in set(names))

    def _offload_bits(self, offload: Offload) -> int:
        if offload not in self._of_offload:
            self._of_offload[offload] = self._used(Strategy().unchecked(offload=offload), self._named[Offload])
        return self._of_offload[offload]


def findings_of(job: Job, *, any_priced: bool = False) -> list[Finding]:
    """What keeps a job from being offered, worst first."""
    rows = rows_against(job, any_priced=any_priced)
    return [finding for finding in verdict(job).findings if finding in rows]

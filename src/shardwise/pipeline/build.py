"""Pipeline schedules by name."""

from __future__ import annotations

from shardwise.pipeline.builders.automatic import automatic
from shardwise.pipeline.builders.dualpipe import dualpipe, dualpipev
from shardwise.pipeline.builders.gpipe import gpipe
from shardwise.pipeline.builders.interleaved import interleaved
from shardwise.pipeline.builders.one_f_one_b import one_f_one_b
from shardwise.pipeline.builders.sequential import sequential
from shardwise.pipeline.builders.v_shape import v_half, v_min, zbv
from shardwise.pipeline.builders.zero_bubble import zb_h1, zb_h2
from shardwise.pipeline.schedule import PipelineSchedule
from shardwise.pipeline.times import StageTimes
from shardwise.spec.errors import SpecError, nearest_name, shown

_PLAIN = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}
_V_SHAPED = {"zbv": zbv, "v-half": v_half, "v-min": v_min}
_LIMITS = {"zb-1p": 1, "zb-2p": 2}  # memory limit in pipeline depths
NAMES = (*_PLAIN, "interleaved", *_V_SHAPED, *_LIMITS, "zb-auto")
TWO_CHUNKS = frozenset((*_V_SHAPED, "dualpipev"))


def build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    times: StageTimes | None = None,
    memory_limit: float | None = None,
    comm_seconds: float = 0.0,
    released_by_input_grad: float = 0.0,
) -> PipelineSchedule:
    """The schedule ``name`` over ``ranks`` pipeline ranks.

    ``chunks`` (stages per rank) is a choice for interleaved only. ``times`` and ``comm_seconds`` place the
    weight gradients of zbv, v-half, v-min and the automatic zb-1p, zb-2p and zb-auto (default: all passes
    equal); the others have one order. ``memory_limit``, in microbatch activations, is zb-auto's, and
    ``released_by_input_grad`` the share of an activation that zb-1p, zb-2p and zb-auto may count as free
    after its input gradient.
    """
    _check_count("ranks", ranks)
    _check_count("microbatches", microbatches)
    v = chunks_per_rank(name, chunks)
    if times is not None and times.stages != ranks * v:
        problem = f"{times.stages} stages, but {name} on {ranks} ranks has {ranks * v}"
        raise SpecError("times", problem, "give one time per stage")
    if not 0 <= released_by_input_grad <= 1:
        problem = f"{shown(released_by_input_grad)} is not between 0 and 1"
        raise SpecError("released_by_input_grad", problem, "give a number between 0 and 1")
    if memory_limit is not None and name != "zb-auto":
        raise SpecError("memory_limit", f"{name} has its own memory", "use zb-auto to give a limit")
    if name in _PLAIN:
        return _PLAIN[name](ranks, microbatches)
    if name in _V_SHAPED:
        return _V_SHAPED[name](ranks, microbatches, times, comm_seconds)
    if name == "interleaved":
        return interleaved(ranks, microbatches, v)
    limit = _LIMITS[name] * ranks if name in _LIMITS else memory_limit
    if limit is None:
        raise SpecError("memory_limit", "zb-auto needs one", f"give a number of microbatches, such as {ranks}")
    return automatic(name, ranks, microbatches, limit, times, comm_seconds, released_by_input_grad)


def chunks_per_rank(name: str, chunks: int | None = None) -> int:
    """Stages per rank of schedule ``name``; ``chunks`` is what the user asked for, if anything."""
    if name not in NAMES:
        raise SpecError("schedule", f"{shown(name)} is not a pipeline schedule", nearest_name(name, NAMES))
    if chunks is not None:
        _check_count("chunks", chunks)
    if name == "interleaved":
        return 2 if chunks is None else chunks
    own = 2 if name in TWO_CHUNKS else 1
    if chunks not in (None, own):
        raise SpecError("chunks", f"{name} has {own} per rank, not {chunks}", "leave chunks out, or use interleaved")
    return own


def _check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(field, f"{shown(value)} is not a count", "give a whole number of 1 or more")

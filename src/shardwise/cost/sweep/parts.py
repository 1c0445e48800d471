"""Costs of a layer of each kind, the embedding and the head, computed once per distinct key; a rank is a sum of these.

The figures come from the functions that price a job (`stage_time`, `activations`, `traffic`), called for a rank that
holds only the one part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.cost.memory.activations import embedding_activation_bytes, head_activation_bytes, layer_activation_bytes
from shardwise.cost.memory.restored import left_by_router_bytes, restored_bytes
from shardwise.cost.memory.transient import (
    Moment,
    cache_slack,
    message_buffer_bytes,
    only_cached_bytes,
    transient_bytes,
)
from shardwise.cost.step.stage_time import part_seconds
from shardwise.cost.sweep.columns import Group, LayerChoice
from shardwise.cost.traffic.context import context_traffic
from shardwise.cost.traffic.execution import executed
from shardwise.cost.traffic.expert import expert_traffic
from shardwise.cost.traffic.pipeline import message_traffic, tied_bytes, tied_traffic
from shardwise.cost.traffic.tensor import replicated_gradient_traffic, tensor_traffic_of_passes
from shardwise.cost.traffic.traffic import Traffic, Window
from shardwise.layout.payloads import Pass, Payload, Role, sent_forward
from shardwise.layout.sharding import Sharding
from shardwise.layout.stages import RankContents, tuned_at, tuned_kinds
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


Piece = TypeVar("Piece")
Probes = Callable[[str], Job]
MODES = ("none", "selective", "full")
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, ATTENTION_FORWARD, ATTENTION_BACKWARD, SAVED, CACHED, RESTORED, LEFT = range(
    9
)


def parts_of(model: Model) -> tuple[RankContents, ...]:
    """Ranks with one part each: a layer of every kind of the model, the embedding, the head."""
    layers = (RankContents(0, ((kind, 1),), False, False, 0.0, 0.0, 0.0) for kind in model.kinds)
    ends = (RankContents(0, (), embedding, not embedding, 0.0, 0.0, 0.0) for embedding in (True, False))
    return (*layers, *ends)


def probes(job: Job, base: Strategy, layer: LayerChoice) -> Probes:
    """The job of one microbatch with a layer choice, under each recompute mode; created on first use."""

    @cache
    def probe(mode: str) -> Job:
        strategy = base.unchecked(**vars(layer), recompute=mode, stage_layers="balanced")
        training = job.training.unchecked(global_batch=strategy.data_parallel * strategy.microbatch)
        return job.unchecked(strategy=strategy, training=training)

    return probe


def probed_seconds(job: Job, probe: RankContents) -> tuple[float, ...]:
    seconds = part_seconds(job, probe)
    return (*seconds.passes, seconds.attention.forward, seconds.attention.backward)


def probed_bytes(job: Job, probe: RankContents) -> tuple[float, float, float, float]:
    """Saved activations, what autocast's cache adds at the loss (`cached_copy_bytes`), and what recompute restores, and
    leaves (`left_by_router_bytes`)."""
    if probe.has_embedding:
        return embedding_activation_bytes(job), 0.0, 0.0, 0.0
    if probe.has_head:
        return head_activation_bytes(job), -cache_slack(job), 0.0, 0.0
    ((kind, _),) = probe.kinds
    cached = only_cached_bytes(job, kind) if job.strategy.recompute == "full" else 0.0
    return layer_activation_bytes(job, kind), cached, restored_bytes(job, kind), left_by_router_bytes(job, kind)


@dataclass(frozen=True)
class LineKey:
    """One kind of communication inside a layer, as far as all layers share it."""

    dimension: str
    payload: Payload | None  # None for all that cannot be overlapped
    in_pass: Pass
    window: Window


@dataclass(frozen=True)
class PartLine:
    """The seconds of one kind of communication in every part."""

    seconds: Array  # part × mode × (total, what cannot be overlapped, what recompute repeats, on each link)
    units_taken: float


@dataclass(frozen=True)
class Parts:
    """Figures of the parts (`parts_of`) under every recompute mode, for one microbatch on one device."""

    figures: Array  # part × mode × figure (`FORWARD` to `LEFT`)
    lines: Mapping[LineKey, PartLine]
    transient_bytes: Callable[[Moment, tuple[LayerRecord, ...], bool], float]
    """At a moment, with some kinds of layer, with or without a head."""
    message_bytes: float  # buffers of each microbatch for messages


@dataclass(frozen=True)
class PartStack:
    """The parts of several layer choices as one array."""

    figures: Array
    """Figure × layer choice × part × mode: first the figures of `Parts`, then those of every `PartLine`, which are 0
    for a choice without that line."""
    keys: tuple[LineKey, ...]  # the lines
    units_taken: tuple[Array, ...]  # by layer choice, for every line


class PartBook:
    """Parts by what they depend on; each is priced once.

    All groups have the same ``overlap`` (except for experts) and ``dispatch``.
    """

    def __init__(self, job: Job) -> None:
        """``job`` has everything but the strategy."""
        self.job = job
        self.links = tuple(dict.fromkeys(level.name for level in job.cluster.levels))
        self.line_width = 3 + len(self.links)
        self.probes = parts_of(job.model)
        self._tuned: dict[tuple[Any, ...], PartBook] = {}
        self._parts: dict[tuple[Any, ...], Parts] = {}
        self._pieces: dict[tuple[Any, ...], Any] = {}
        self._stacks: dict[tuple[int, ...], PartStack] = {}

    def of_ranks(self, group: Group) -> tuple[PartBook, ...]:
        """The book of each kind of rank, for what its layers are tuned; one for all where that is alike."""
        strategy = group.base.unchecked(**vars(group.schedules[0]))
        job = self.job.unchecked(strategy=strategy)
        books = tuple(self._of_rank(job, members[0]) for members in group.members)
        return books if len(set(books)) > 1 else books[:1]

    def _of_rank(self, job: Job, rank: int) -> PartBook:
        kinds = tuned_kinds(job, rank)
        if not kinds:
            return self
        if kinds not in self._tuned:
            training = tuned_at(job, rank).training
            self._tuned[kinds] = PartBook(self.job.unchecked(training=training))
        return self._tuned[kinds]

    def parts(self, group: Group, layer: LayerChoice) -> Parts:
        base, places = group.base, group.places
        key = (base.tp, base.cp, base.ep, base.expert_tp, base.pp > 1, base.overlap.ep, layer, places["tp"],
               places["cp"], places["ep"], places["expert_tp"], self._whole(base),
               self.job.stack.gathers_by_host(self.job.training, base))  # fmt: skip
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = self._priced(group, layer)
        return parts

    def _tokens(self, base: Strategy, layer: LayerChoice) -> tuple[float, int]:
        """What the tokens of a microbatch depend on; of documents that are padded, the longest of them all."""
        training = self.job.training
        return layer.microbatch * training.seq / base.cp, layer.microbatch * (training.lengths is not None)

    def _whole(self, base: Strategy) -> bool:
        """Whether matmuls may keep copies of whole weights (`Job.autocasts`)."""
        return self.job.stack.autocast and base.zero == 0

    def stack(self, parts: Sequence[Parts]) -> PartStack:
        """The parts as one array; layouts that differ only in pipeline or data parallelism share it."""
        key = tuple(map(id, parts))
        if key not in self._stacks:
            self._stacks[key] = self._stacked(parts)
        return self._stacks[key]

    def _stacked(self, parts: Sequence[Parts]) -> PartStack:
        import numpy as np

        none = PartLine(np.zeros((len(self.probes), len(MODES), self.line_width)), 0.0)
        keys = _ordered(tuple(choice.lines) for choice in parts)
        lines = [[choice.lines.get(key, none) for choice in parts] for key in keys]
        figures = [np.stack([choice.figures for choice in parts])]
        figures += [np.stack([line.seconds for line in of_key]) for of_key in lines]
        together = np.ascontiguousarray(np.moveaxis(np.concatenate(figures, axis=-1), -1, 0))
        units = [np.array([line.units_taken for line in of_key]) for of_key in lines]
        return PartStack(together, tuple(keys), tuple(units))

    def message_seconds(self, group: Group, layer: LayerChoice) -> float:
        """One message to the neighbouring pipeline stage."""
        base = group.base
        if base.pp == 1:
            return 0.0
        tokens = self._tokens(base, layer)

        def price() -> float:
            traffic = message_traffic(probes(self.job, base, layer)("none"), sent_forward(Role.ACTIVATIONS))
            assert traffic is not None
            return float(traffic.cost.seconds)

        key = (tokens, base.tp, layer.sequence_parallel, group.places["tp"], group.places["pp"])
        return self._piece("message", key, price)

    def once_seconds(self, group: Group, contents: RankContents, sequence_parallel: bool) -> float:
        """Communication of such a rank after the last microbatch, without data parallelism and tied embeddings."""
        base, places = group.base, group.places
        ends = (contents.kinds, contents.has_embedding)

        def price() -> float:
            job = probes(self.job, base, LayerChoice(sequence_parallel, "ring", 1))("none")
            return sum(traffic.seconds for traffic in replicated_gradient_traffic(job, contents))

        return self._piece("unsplit", (base.tp, sequence_parallel, ends, places["tp"]), price)

    def tied_seconds(self, group: Group, contents: RankContents, sharding: Sharding) -> list[float]:
        """Exchange of such a rank with the other end of the pipeline, for every column of ``sharding``."""
        base, ends = group.base, (contents.has_embedding, contents.has_head)
        job = probes(self.job, base, LayerChoice(True, "ring", 1))("none")

        def price(size: float) -> float:
            key = (base.tp, ends, group.places["pp"], base.schedule, size)
            return self._piece("tied", key, lambda: sum(sent.seconds for sent in tied_traffic(job, contents, size)))

        return [price(tied_bytes(job, shards)) for shards in sharding.shards.tolist()]

    def _priced(self, group: Group, layer: LayerChoice) -> Parts:
        """Parts put together from pieces, each remembered by the few values that it depends on."""
        import numpy as np

        base, places = group.base, group.places
        jobs = probes(self.job, base, layer)
        tokens = self._tokens(base, layer)
        common = (tokens, base.tp, layer.sequence_parallel or base.tp == 1, base.expert_tp)
        method = layer.context_method if base.cp > 1 else ""
        whole = self._whole(base)
        exchanged = method == "ulysses"  # up-projections of latent attention are not run again then
        # Context ranks see unequal parts of windows and chunks, and equal parts of everything else.
        cut = method and not exchanged and any(kind.mixer != "full" for kind in self.job.model.kinds)
        timed = (*common, exchanged, base.cp if cut else 1, base.ep)
        seconds = self._piece("seconds", timed, lambda: self._figures(jobs, SAVED, probed_seconds))
        held = (*common, base.cp, base.ep, method, whole)
        saved = self._piece("saved", held, lambda: self._figures(jobs, 4, probed_bytes))
        lines: dict[LineKey, PartLine] = {}
        tensor = (*common, exchanged, base.ep == 1, places["tp"], places["expert_tp"])
        lines |= self._piece("tp", tensor, lambda: self._lines(jobs, tensor_traffic_of_passes))
        if base.cp > 1:
            context = (tokens, base.tp, base.cp, layer.context_method, places["cp"])
            lines |= self._piece("cp", context, lambda: self._lines(jobs, context_traffic))
        if base.ep > 1:
            expert = (*common, base.ep, base.overlap.ep, places["ep"])
            lines |= self._piece("ep", expert, lambda: self._lines(jobs, expert_traffic))
        buffers = self._piece(
            "buffers",
            (*common, base.cp, base.ep, base.pp > 1, method, whole),
            lambda: cache(
                lambda moment, kinds, has_head: sum(transient_bytes(jobs("none"), kinds, moment, has_head=has_head))
            ),
        )
        return Parts(np.concatenate([seconds, saved], axis=-1), lines, buffers, message_buffer_bytes(jobs("none")))

    def _piece(self, name: str, key: tuple[Any, ...], price: Callable[[], Piece]) -> Piece:
        piece: Piece | None = self._pieces.get((name, *key))
        if piece is None:
            piece = self._pieces[name, *key] = price()
        return piece

    def _probed(self, jobs: Probes) -> Iterator[tuple[int, Any, Job, RankContents]]:
        """Each part with its modes and the job and rank to price; recompute changes layers, not embedding and head."""
        for part, probe in enumerate(self.probes):
            if not probe.layers:
                yield part, slice(None), jobs("none"), probe
                continue
            for number, mode in enumerate(MODES):
                yield part, number, jobs(mode), probe

    def _figures(self, jobs: Probes, width: int, of: Callable[[Job, RankContents], tuple[float, ...]]) -> Array:
        """Part × mode × the ``width`` figures that ``of`` gives."""
        import numpy as np

        table = np.zeros((len(self.probes), len(MODES), width))
        for part, modes, job, probe in self._probed(jobs):
            table[part, modes] = of(job, probe)
        return table

    def _lines(self, jobs: Probes, traffic_of: Callable[[Job, RankContents], list[Traffic]]) -> dict[LineKey, PartLine]:
        """Lines of the parts; those of a dimension that cannot be overlapped are pooled, one for each pass."""
        import numpy as np

        lines: dict[LineKey, PartLine] = {}
        none = np.zeros((len(self.probes), len(MODES), self.line_width))
        for part, modes, job, probe in self._probed(jobs):
            for traffic in traffic_of(job, probe):
                if not traffic.count:
                    continue
                run = executed(job, traffic)
                line = lines.setdefault(_line_key(run), PartLine(none.copy(), run.units_taken)).seconds
                line[part, modes, 0] += run.seconds
                line[part, modes, 1] += run.seconds * run.unhideable
                line[part, modes, 2] += run.seconds * run.repeated
                for name, seconds in run.level_seconds.items():
                    line[part, modes, 3 + self.links.index(name)] += seconds
        return lines


def _ordered(orders: Iterable[tuple[LineKey, ...]]) -> list[LineKey]:
    """All keys by dimension, those without overlap last, otherwise in the order of the layer choices they come from."""
    ordered: list[LineKey] = []
    for order in dict.fromkeys(orders):
        place = 0
        for key in order:
            if key not in ordered:
                ordered.insert(place, key)
            place = ordered.index(key) + 1
    return sorted(ordered, key=lambda key: (("tp", "cp", "ep").index(key.dimension), key.window == "none"))


def _line_key(traffic: Traffic) -> LineKey:
    if traffic.window == "none":
        return LineKey(traffic.dimension, None, traffic.in_pass, "none")
    return LineKey(traffic.dimension, traffic.payload, traffic.in_pass, traffic.window)

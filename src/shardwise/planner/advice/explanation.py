"""Why the first strategy wins, why not another, what would change that, and what a textbook would choose.

A textbook fills the node with TP, then takes PP or ZeRO-3 across nodes until it fits, then DP; for mixtures of experts
EP takes the place of TP (Narayanan et al. 2021, arXiv 2104.04473, section 3, takeaways 1 and 2; the rules of thumb
of Megatron-LM's and TorchTitan's guides).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.planner.candidate import PARTS, Candidate, candidate, strategy_words
from shardwise.planner.constraints import Allowed, has
from shardwise.planner.plan import Group, Plan, plan, what_is_missing, why_behind
from shardwise.planner.request import Request
from shardwise.planner.search.search import PricedStrategy, Search, search
from shardwise.planner.search.space import plain_strategy
from shardwise.planner.search.supported import findings_of
from shardwise.spec.errors import SpecError, in_flags
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors
from shardwise.spec.schedules import schedule_records
from shardwise.spec.strategy import Strategy
from shardwise.spec.support import Finding
from shardwise.spec.units import readable_bytes
from shardwise.uncertainty.residuals import Noise

# -- Why not another strategy: what rules it out, or by how much it loses; and what a feature we lack costs

TIE = 0.0005  # a smaller share prints as 0.0%


@dataclass(frozen=True)
class WhyNot:
    """The answer to one "why not"."""

    wanted: str
    verdict: str  # "does not divide", "not supported", "does not fit", "within noise", "slower" or "the plan itself"
    reason: str
    best: Candidate | None = None  # the best strategy with the wanted values, if any could be priced
    loss: float | None = None  # extra time per token against the fastest, as a share


@dataclass(frozen=True)
class Wish:
    """A request for strategies with certain values, and what the search for them found."""

    words: str
    wanted: Mapping[str, Allowed]
    request: Request
    result: Plan | Search | None  # none if the request itself rules the values out; ``problem`` says why
    problem: str = ""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.result.candidates if isinstance(self.result, Plan) else ()


def wish(base: Plan, wanted: Mapping[str, Allowed]) -> Wish:
    """Searches strategies with the ``wanted`` values; the caller adds those simulated to the plan."""
    words = ", ".join(f"{name} {values}" for name, values in wanted.items())
    request = base.request
    try:
        constraints = request.constraints.with_allowed(wanted)
    except SpecError as error:
        return Wish(words, wanted, request, None, f"{in_flags(error.problem)}: the request rules it out")
    # Offload only if the plan offloads: it should not rescue an alternative.
    offload = request.offload if request.offload is not None else base.best.job.strategy.offload.any
    restricted = replace(request, constraints=constraints, offload=offload or "offload" in wanted)
    return Wish(words, wanted, restricted, plan(restricted))


def judged(base: Plan, asked: Wish) -> WhyNot:
    """The answer to a wish; the strategies simulated for it are among those of the plan."""
    if isinstance(asked.result, Plan):
        own, wanted = {candidate.job for candidate in asked.candidates}, asked.wanted.items()
        best = next(
            candidate
            for candidate in base.candidates
            if candidate.job in own
            or all(has(candidate.job.strategy, name, values, idle=False) for name, values in wanted)
        )
        return _behind(asked.words, base, best)
    if asked.result is None:
        return WhyNot(asked.words, "does not divide", asked.problem)
    return _ruled_out(asked.words, asked.result, asked.request)


def _ruled_out(words: str, other: Search, request: Request) -> WhyNot:
    if not other.wanted:
        problem, remedy = what_is_missing(other, request)
        return WhyNot(words, "does not divide", in_flags(f"{problem}; {remedy}" if remedy else problem))
    if other.least_memory is None:
        free = plan(replace(request, any_priced=True, memory_bytes=None))
        example = free.best if isinstance(free, Plan) else None
        findings = findings_of(example.job) if example else []
        reason = findings[0].reason if findings else "this project's engine does not run it"
        return WhyNot(words, "not supported", reason, example)
    least = other.least_memory
    reason = f"{strategy_words(least.strategy())} {request.short_words(least.memory_bytes)}"
    return WhyNot(words, "does not fit", reason)


def _behind(words: str, base: Plan, other: Candidate) -> WhyNot:
    first = base.best
    if other is first:
        return WhyNot(words, "the plan itself", "that is what the plan does", other, base.loss_of(other))
    against = f"against 1, {largest_differences(first, other)}"
    return WhyNot(words, base.group_of(other), against, other, base.loss_of(other))


def largest_differences(first: Candidate, other: Candidate) -> str:
    """The parts of the step in which ``other`` loses or gains most, per token, as shares of the step of ``first``."""
    scale = first.job.tokens_per_step / other.job.tokens_per_step
    whole = first.step_seconds
    deltas = {part: (other.parts[part] * scale - first.parts[part]) / whole for part in PARTS}
    ordered = sorted(deltas.items(), key=lambda item: -abs(item[1]))
    shown = [f"{part} {delta:+.1%}" for part, delta in ordered if abs(delta) >= TIE][:4]
    return ", ".join(shown) or "no part differs by 0.1%"


def difference_words(loss: float) -> str:
    """A difference in time: "+1.3%", or "ties" if it would print as 0.0%."""
    return "ties" if abs(loss) < TIE else f"{loss:+.1%}"


@dataclass(frozen=True)
class NotRun:
    """A strategy that our engine does not run, but that beats all it runs by more than noise."""

    best: Candidate
    findings: tuple[Finding, ...]

    @property
    def lacks(self) -> str:
        """What is missing, in the words of the support matrix."""
        return " and ".join(" with ".join(finding.techniques) for finding in self.findings)


def not_run(base: Plan) -> NotRun | None:
    """The first strategy that only `--any` would list, if it gains more than noise."""
    request = base.request
    if request.offers_priced or request.deadline.leaves_out() or not _may_gain(base):
        return None
    other = plan(replace(request, any_priced=True))
    if not isinstance(other, Plan):
        return None
    limit = base.fastest.seconds_per_token / (1 + base.noise.share)
    for row in other.rows:
        findings = tuple(findings_of(row.best.job))
        if findings and row.best.seconds_per_token < limit:
            return NotRun(row.best, findings)
    return None


def _may_gain(base: Plan) -> bool:
    """Whether the price tables have a strategy that our engine does not run and that gains more than noise."""
    fastest = min(priced.seconds_per_sequence for priced in base.search.best)
    return any(priced.seconds_per_sequence * (1 + base.noise.share) < fastest for priced in _seen(base))


def _seen(base: Plan) -> Iterator[PricedStrategy]:
    if base.search.best_not_run is not None:
        yield base.search.best_not_run
    if base.request.job.model.moe:
        yield from _with_hidden_exchange(base.request)


def _with_hidden_exchange(request: Request) -> list[PricedStrategy]:
    """The best strategy whose schedule hides the expert exchange under another microbatch, in an engine that can."""
    hiding = tuple(record.name for record in schedule_records() if record.hides_exchange)
    try:
        constraints = request.constraints.with_allowed({"schedule": Allowed(hiding)})
    except SpecError:
        return []
    wider = replace(request, constraints=constraints, any_priced=True)
    space, capacity = wider.space(offload=False), request.capacity_bytes
    return search(space, memory_bytes=capacity, any_priced=True, kept=1, deadline=request.deadline.part()).best


# -- why the first wins ---------------------------------------------------------------------------

_MOST = 16.0  # the largest factor tried: beyond it machines and batches are unrealistic


@dataclass(frozen=True)
class Turning:
    """A change of the machine or the batch that makes the second strategy as fast as the first."""

    what: str
    factor: float

    def __str__(self) -> str:
        return f"{self.what} × {self.factor:.3g}"


@dataclass(frozen=True)
class PlanExplanation:
    """The plan's first strategy against the next one that is not a near-duplicate."""

    first: Candidate
    second: Candidate | None
    fastest: Candidate
    within: int  # layouts within noise of the fastest
    noise: Noise
    group: Group  # of the second strategy
    differences: str
    turnings: tuple[Turning, ...] | None  # what would make the second win; None if there was no time to search for it

    @property
    def loss(self) -> float:
        assert self.second is not None
        return self.second.loss_to(self.first)

    def sentence(self) -> str:
        """Why it is first, and where the next one loses."""
        return f"{self._standing()} {self._next()}"

    def _standing(self) -> str:
        if self.within == 1 and self.first is self.fastest:
            slower = "" if self.second is None else f", and every other layout takes over {self.noise.share:.1%} longer"
            return f"It is the fastest{slower}."
        noise, gap = f"noise ({self.noise.share:.1%})", self.first.loss_to(self.fastest)
        fastest = "itself" if self.first is self.fastest else f"{strategy_words(self.fastest.job.strategy)}"
        margin = "" if gap < TIE else f" and takes {gap:+.1%}"
        if self.within == 1:
            form = f"It is the simplest form of the fastest layout, within {noise} of its fastest ({fastest}){margin}"
            return f"{form}; every other layout takes longer than that."
        return f"It is the simplest of {self.within} layouts within {noise} of the fastest ({fastest}){margin}."

    def _next(self) -> str:
        if self.second is None:
            return "One device has no other layout." if self.first.job.strategy.world == 1 else "No other layout fits."
        text = f"The next, {strategy_words(self.second.job.strategy)}, "
        if self.group == "within noise":
            more = self.second.margin_bytes - self.first.margin_bytes
            left = f"; it leaves {readable_bytes(more)} more" if more > 0 else ""
            takes = "ties" if abs(self.loss) < TIE else f"takes {self.loss:+.1%} against 1"
            return f"{text}{takes} ({self.differences}) and {why_behind(self.first, self.second)}{left}."
        slower = "" if self.first is self.fastest else f", {self.second.loss_to(self.fastest):+.1%} against the fastest"
        text += f"takes {self.loss:+.1%} against 1{slower}: {self.differences}"
        if self.turnings is None:
            return f"{text}."
        if not self.turnings:
            return f"{text}; no link, device or batch up to {_MOST:g} times as fast or large would reverse that."
        return f"{text}; it would win with {' or '.join(str(turning) for turning in self.turnings)}."


def explain(plan: Plan) -> PlanExplanation:
    """Compares the first strategy with the next that is not a near-duplicate."""
    first, second = plan.best, next((row.best for row in plan.rows[1:]), None)
    within = sum(plan.group_of(layout) == "within noise" for layout in plan.layouts)
    standing = (first, second, plan.fastest, within, plan.noise)
    if second is None:
        return PlanExplanation(*standing, "slower", "", ())
    group = plan.group_of(second)
    deadline = plan.request.deadline.part()
    turned = tuple(deadline.until(turnings(first, second))) if group == "slower" else ()
    differences = largest_differences(first, second)
    return PlanExplanation(*standing, group, differences, None if deadline.was_hit else turned)


def turnings(first: Candidate, second: Candidate) -> Iterator[Turning]:
    """The smallest change of each link's speed, of the arithmetic or of the batch that makes the second win."""
    for index, level in enumerate(first.job.cluster.levels):
        if level.width > 1:
            yield from _turning(first, second, f"{level.name} bandwidth", _with_link(index))
    yield from _turning(first, second, "arithmetic", _with_arithmetic)
    yield from _turning(first, second, "global batch", _with_batch, whole=True)


Change = Callable[[Job, float], Job]


def _turning(
    first: Candidate, second: Candidate, what: str, change: Change, *, whole: bool = False
) -> Iterator[Turning]:
    """The change by the smallest factor, up or down, with which the second strategy wins, if there is one."""

    def ahead(factor: float) -> bool:
        """Whether the second is at least as fast with the change."""
        try:
            jobs = [change(contender.job, factor) for contender in (first, second)]
            before, after = (predict(job).step_seconds / job.tokens_per_step for job in jobs)
        except SpecError:
            return False
        return after <= before

    if ahead(1.0):
        return  # the closed form, unlike the simulation, ranks the second first: there is no turning point
    for direction in (1,) if whole else (1, -1):
        factor = 1.0
        while factor < _MOST:
            factor *= 2
            if ahead(factor**direction):
                yield Turning(what, factor if whole else _refined(ahead, factor, direction))
                break


def _refined(ahead: Callable[[float], bool], factor: float, direction: int) -> float:
    """The smallest sufficient factor between ``factor / 2`` and ``factor``, to a few percent."""
    low, high = factor / 2, factor
    for _ in range(5):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if ahead(middle**direction) else (middle, high)
    return float(high**direction)


def _with_link(index: int) -> Change:
    def change(job: Job, factor: float) -> Job:
        level = job.cluster.levels[index]
        faster = level.with_speed(level.bandwidth_per_direction * factor, level.wire_latency)
        return job.unchecked(cluster=job.cluster.with_level(index, faster))

    return change


def _with_arithmetic(job: Job, factor: float) -> Job:
    device = job.cluster.device
    peak = {name: flops * factor for name, flops in device.peak.items()}
    return job.unchecked(cluster=replace(job.cluster, device=replace(device, peak=peak)))


def _with_batch(job: Job, factor: float) -> Job:
    return replace(job, training=replace(job.training, global_batch=int(job.sequences * factor)))


_RECOMPUTES = ("none", "selective", "full")


def textbook(request: Request) -> Candidate | None:
    """What a textbook would choose: the better of its pipeline and its ZeRO-3 variant; None if neither fits."""
    inner = _inside_the_node(request.job)
    ways = (_by_pipeline(request, inner), _by_zero3(request, inner))
    fitting = [_first_that_fits(request, options) for options in ways]
    priced = [candidate(job) for job in fitting if job is not None]
    return min(priced, key=lambda option: option.seconds_per_token, default=None)


def _inside_the_node(job: Job) -> Strategy:
    """The largest TP, or EP for experts, that fits in one node."""
    width = min(job.cluster.levels[0].width, job.cluster.devices)
    model = job.model
    plain = plain_strategy(job)
    if model.moe:
        ep = max(degree for degree in divisors(model.moe.experts) if degree <= width and width % degree == 0)
        return replace(plain, ep=ep, expert_tp=1)
    for tp in sorted(divisors(width), reverse=True):
        try:
            replace(job, strategy=replace(plain, tp=tp), training=replace(job.training, global_batch=None))
            return replace(plain, tp=tp)
        except SpecError:
            continue
    return plain


def _by_pipeline(request: Request, inner: Strategy) -> Iterator[Strategy]:
    """Pipelines of growing length with ZeRO-1, each with no, selective and full recompute."""
    layers, devices = request.job.model.layers, request.job.cluster.devices // inner.tp
    for pp in (degree for degree in divisors(devices) if degree <= layers):
        split = "even" if layers % pp == 0 else "balanced"
        for recompute in _RECOMPUTES:
            zero = int(devices > pp)  # one rank has nothing to shard
            yield replace(inner, pp=pp, zero=zero, recompute=recompute, stage_layers=split)  # type: ignore[arg-type]


def _by_zero3(request: Request, inner: Strategy) -> Iterator[Strategy]:
    """ZeRO-3 over all devices, with no, selective and full recompute."""
    if request.job.cluster.devices == inner.tp:
        return
    for recompute in _RECOMPUTES:
        yield replace(inner, zero=3, recompute=recompute, stage_layers="even")  # type: ignore[arg-type]


def _first_that_fits(request: Request, strategies: Iterator[Strategy]) -> Job | None:
    for strategy in strategies:
        job = _job(request, strategy)
        if job is None or findings_of(job, any_priced=request.any_priced):
            continue
        if peak_memory(job).total <= request.capacity_bytes:
            return job
    return None


def _job(request: Request, strategy: Strategy) -> Job | None:
    job, minimum = request.job, request.minimum_batch
    try:
        whole = job.unchecked(strategy=strategy, training=replace(job.training, global_batch=None))
        completed = replace(whole, strategy=strategy)
        multiple = completed.strategy.batch_multiple
        batch = -(-minimum // multiple) * multiple if minimum is not None else job.training.global_batch
        return replace(completed, training=replace(job.training, global_batch=batch))
    except SpecError:
        return None

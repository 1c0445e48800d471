"""A parallel dimension of a job: what it sends and why, with the job's numbers."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost.analysis import Analysis
from shardwise.cost.memory.activations import key_value_features
from shardwise.cost.traffic.context import exchanged_features
from shardwise.cost.traffic.data import ServerPrice, communication_units, server_price, wire_bytes
from shardwise.cost.traffic.expert import places_of_levels
from shardwise.layout.groups import expert_runs
from shardwise.layout.network import network, spanned
from shardwise.layout.payloads import Payload, Role, Share
from shardwise.layout.pieces import ServerPlan
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import RankContents
from shardwise.report.explain.explanation import (
    Explanation,
    Formula,
    GridTable,
    Quantity,
    Value,
    number,
    rate,
    seconds,
    size,
)
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.units import counted

Symbols = tuple[tuple[str, str, Quantity], ...]

_THEORY = {
    "tp": Explanation(
        "Tensor parallelism",
        (),
        ("Shoeybi et al. 2019 (arXiv 1909.08053)", "Korthikanti et al. 2022 (arXiv 2205.05198)"),
        remarks=(
            "Per layer and microbatch, without SP: 2 all-reduces forward and 2 backward. With SP: 2 all-gathers and 2 "
            "reduce-scatters each way, the same bytes, and 2 re-gathers for weight gradients.",
            "A column-parallel layer does not all-reduce its output; its input gradient is reduced.",
            "The row-parallel layer reduces its output.",
        ),
    ),
    "dp": Explanation(
        "Data parallelism",
        (),
        ("Rajbhandari et al. 2020 (arXiv 1910.02054), section 7",),
        remarks=(
            "Replicated: an all-reduce of all gradients in a step. ZeRO-1 and 2: a reduce-scatter and an all-gather, "
            "the same bytes. ZeRO-3: 1.5 times, gathers again every microbatch.",
            "ZeRO never gathers the full gradient: each rank updates its own shard and parameters are gathered.",
        ),
    ),
    "pp": Explanation(
        "Pipeline parallelism",
        (),
        ("Narayanan et al. 2021 (arXiv 2104.04473)",),
        remarks=(
            "Per stage boundary and microbatch one message each way, and one latency for each.",
            "Interleaving sends v times as many messages. The bubble is explained by `shardwise explain bubble`.",
        ),
    ),
    "cp": Explanation(
        "Context parallelism",
        (),
        ("Liu et al. 2023 (arXiv 2310.01889)", "Llama 3 (arXiv 2407.21783)", "Jacobs et al. 2023 (arXiv 2309.14509)"),
        remarks=(
            "ring: cp − 1 sends of a rank's keys and values forward, twice as many backward, under attention itself; "
            "all-gather: gathered forward, gathered and reduce-scattered backward; ulysses: q, k, v and the output "
            "exchanged each way (--context-method).",
            "Training has no KV cache; context parallelism splits attention over the sequence.",
        ),
    ),
    "ep": Explanation(
        "Expert parallelism",
        (),
        ("Lepikhin et al. 2020, GShard (arXiv 2006.16668)", "DeepSeek-V3 (arXiv 2412.19437), section 3.2.2"),
        remarks=(
            "Dispatch and combine, forward and backward: 4 exchanges per layer and microbatch.",
            "Expert tensor, expert and expert data parallelism share the tp·cp·dp ranks of a stage.",
        ),
    ),
}


def explain_dimension(name: str, analysis: Analysis) -> Explanation:
    """The theory of a parallel dimension, and what it sends in this job."""
    theory, whole = _THEORY[name], analysis.job
    prediction = analysis.step.prediction
    contents = (prediction.last if name == "dp" else prediction.slowest).contents
    job = whole.of_stage(analysis.dimension_rank(name))
    traffics = analysis.dimension_traffics(name)
    own = _OWN_SYMBOLS[name](job, contents) if name in _OWN_SYMBOLS and traffics else ()
    numbers = (*_common(job), *own)
    formulas = [Formula(f"{t.what}: bytes", text) for t in traffics if (text := _bytes_of(name, t.payload, job))]
    results: list[tuple[str, Quantity]] = []
    if name == "ep" and traffics and job.strategy.dispatch == "deduplicated":
        symbols, more = _deduplicated(job)
        numbers += symbols
        values = {symbol: value.value for symbol, _, value in numbers}
        for formula in more:
            values[formula.symbol] = formula.value(values)
        formulas += more
        results = [
            (formula.title, number(value, f"{value:.4g}") if formula.symbol else size(value))
            for formula, value in ((formula, formula.value(values)) for formula in more)
        ]
    rows = tuple(
        (
            t.what,
            t.kind.value.replace("_", "-"),
            t.network,
            number(t.count, f"{t.count:,.0f}"),
            size(t.size_bytes),
            seconds(float(t.cost.seconds)),
            seconds(t.added_seconds),
        )
        for t in traffics
    )
    columns = {name: name for name in ("what", "collective", "network", "times", "bytes")}
    columns |= {"each": "each_seconds", "exposed": "exposed_seconds"}
    return replace(
        theory,
        title=f"{theory.title} of {job.model.name} on {job.cluster.devices} × {job.cluster.device.name}",
        formula=tuple(map(str, formulas)),
        numbers=(*numbers, ("", "microbatches", number(job.microbatches))),
        result=(
            ("seconds per step", seconds(sum(t.seconds for t in traffics))),
            ("of them exposed in the predicted step", seconds(sum(t.added_seconds for t in traffics))),
            ("bytes the busiest device sends", size(sum(t.bytes_sent for t in traffics))),
            *results,
        ),
        tables=(GridTable("in one step", columns, rows, words=3, optional=("network",)),) if rows else (),
        remarks=theory.remarks if rows else (f"This job has {name} 1: nothing is sent.", *theory.remarks),
    )


def _common(job: Job) -> Symbols:
    strategy = job.strategy
    degrees = {"tp": strategy.tp, "cp": strategy.cp, "dp": strategy.data_parallel, "pp": strategy.pp, "ep": strategy.ep}
    return (
        ("b", "sequences of a microbatch", number(strategy.microbatch)),
        ("s", "tokens of a sequence", number(job.training.seq)),
        ("h", "hidden size", number(job.model.hidden)),
        ("e", "bytes per element", number(job.training.recipe.communication)),
        *((name, "degree", number(degree)) for name, degree in degrees.items()),
    )


def _context_symbols(job: Job, contents: RankContents) -> Symbols:
    what, features = "keys and values", key_value_features
    if job.strategy.context_method == "ulysses":
        what, features = "q, k, v and output", exchanged_features
    return (("w", f"features of {what} of a token, on one tensor parallel rank", number(features(job))),)


def _expert_symbols(job: Job, contents: RankContents) -> Symbols:
    strategy, moe, recipe = job.strategy, job.model.moe, job.training.recipe
    assert moe is not None
    copies = 1 if strategy.sequence_parallel else min(strategy.tp, strategy.expert_tensor_parallel)
    narrow = min(recipe.linear_input, recipe.communication) if job.stack.fp8_dispatch else recipe.communication
    return (
        ("k", "experts of a token", number(moe.top_k)),
        ("r", "tensor parallel ranks that send the same token", number(copies)),
        ("e_d", "bytes per element, dispatched", number(narrow)),
    )


def _data_symbols(job: Job, contents: RankContents) -> Symbols:
    wire, once = wire_bytes(job, job.strategy.pp), sharding_of(job.strategy).gathers_once
    units = communication_units(job, contents, job.strategy.gradient_group, gathers_once=once)
    symbols = [
        ("P", "parameters of a rank that are not experts", number(contents.dense)),
        ("U", "pieces that they are sent in", number(units[0])),
        ("e_g", "bytes of a gradient", number(wire.gradient)),
        ("e_w", "bytes of a gathered weight", number(wire.weight)),
    ]
    if contents.experts:
        symbols[2:2] = [
            ("P_x", "parameters of a rank's experts", number(contents.experts)),
            ("U_x", "pieces that they are sent in", number(units[1])),
        ]
    return tuple(symbols)


_OWN_SYMBOLS = {"cp": _context_symbols, "ep": _expert_symbols, "dp": _data_symbols}
_HIDDEN_STATES = (Role.INPUTS, Role.OUTPUTS, Role.OUTPUT_GRADIENTS, Role.INPUT_GRADIENTS, Role.SAVED_INPUTS)


def _bytes_of(dimension: str, payload: Payload, job: Job) -> str:
    """The formula for the bytes of one collective; empty for small ones, and for those that only some jobs send."""
    strategy = job.strategy
    if dimension == "tp":
        return "b·s/cp·h·e" if payload.role in _HIDDEN_STATES and payload.share is Share.DENSE else ""
    if dimension == "cp":
        return {"ring": "b·s/cp·w·e", "all-gather": "b·s·w·e", "ulysses": "b·s/cp·w·e/4"}[strategy.context_method]
    if dimension == "ep":
        return f"r·b·s/(cp·tp)·k·h·{'e_d' if payload.role is Role.DISPATCH else 'e'}"
    if dimension == "pp" and payload.role in (Role.ACTIVATIONS, Role.GRADIENTS):
        return "b·s/(cp·tp)·h·e" if strategy.sequence_parallel or job.stack.scattered_messages else "b·s/cp·h·e"
    if dimension == "dp":
        piece = "P_x/U_x" if payload.share is Share.EXPERTS else "P/U"
        wire = wire_bytes(job, strategy.pp)
        if payload.role is Role.GRADIENTS:
            return f"{piece}·e_g"
        if payload.role is Role.PARAMETERS and (sharding_of(strategy).gathers_once or not wire.narrower):
            return f"{piece}·e_w" if not wire.ends_once or payload.in_pass == "forward" else ""
    return ""


def _deduplicated(job: Job) -> tuple[Symbols, list[Formula]]:
    """Symbols and formulas for the places a token visits on each network level, and the bytes a rank sends for it."""
    topology, moe = spanned(job.cluster, expert_runs(job.strategy), "strategy.ep", "all"), job.model.moe
    assert topology is not None and moe is not None
    symbols: list[tuple[str, str, Quantity]] = [("E", "experts of a layer", number(moe.experts))]
    formulas, terms = [], []
    for index, places, limit in places_of_levels(topology, moe):
        level, n = topology.levels[index], f"N{index + 1}"
        symbols.append((n, f"places that {level.name} leads to", number(places)))
        symbols.append((f"w{index + 1}", f"members of {level.name}", number(level.shape.size)))
        text = f"{n}·(1 − C(E − E/{n}, k)/C(E, k))"
        if limit is not None:
            symbols.append((f"M{index + 1}", "of them, the most that routing allows a token", number(limit)))
            text = f"min({text}, M{index + 1})"
        formulas.append(Formula("visited by a token", text, f"V{index + 1}"))
        terms.append(f"V{index + 1}·(w{index + 1} − 1)/w{index + 1}")
    sent = f"r·b·s/(cp·tp)·h·e_d·({' + '.join(terms)})"
    return tuple(symbols), [*formulas, Formula("bytes that a rank sends of one dispatch", sent)]


# -- parameter servers beside an all-reduce ----------------------------------------------------------

_COLUMNS = {
    "": "what",
    "x": "weights",
    "in": "received_bytes",
    "out": "sent_bytes",
    "exchange": "seconds",
    "times": "ratio",
    "asynchronous, at least": "asynchronous_seconds",
}


def explain_parameter_server(job: Job, servers: int | None) -> Explanation:
    """Every device of the job is a worker; without ``servers``, for 1, 2, 4, ... up to one server per worker."""
    recipe, cluster = job.training.recipe, job.cluster
    workers, elements = cluster.devices, int(parameter_count(job.model))

    def plan(count: int) -> ServerPlan:
        return ServerPlan(workers, count, elements, recipe.gradient, recipe.weight)

    counts = [servers] if servers is not None else [count for count in _powers(workers) if count <= elements]
    prices = {count: server_price(plan(count), cluster) for count in counts}
    reduced = prices[counts[0]].all_reduce
    rows = [_row(plan(count), price) for count, price in prices.items()]
    sent, took = float(reduced.sent_bytes), float(reduced.seconds)
    rows.append(
        ("all-reduce, at a rank", "", size(float(reduced.received_bytes)), size(sent), seconds(took), number(1), "")
    )
    level = network(cluster).levels[-1]
    return Explanation(
        title=f"Parameter servers for {workers:,} workers: {job.model.name} on {cluster.device.name}",
        formula=(
            "t(V) = startup + a + (V + sqrt(ramp·V))·b",
            "in = n·x·e_g",
            "out = n·x·e_w",
            "exchange = t(max(n·x, P)·e_g) + t(max(n·x, P)·e_w)",
            "asynchronous, at least = max(t(max(n·x, P)·e_g), t(max(n·x, P)·e_w))",
        ),
        numbers=(
            ("n", "workers, each with a whole copy of the model", number(workers)),
            ("P", "weights", number(elements)),
            ("e_g", "bytes of a gradient", number(recipe.gradient)),
            ("e_w", "bytes of a weight", number(recipe.weight)),
            ("a", f"latency of {level.name}", seconds(level.latency)),
            ("startup", "once for a message", seconds(level.startup)),
            ("ramp", "bytes at which half of the bandwidth is reached", size(level.ramp_bytes)),
            ("1/b", "bandwidth of a link, one direction", rate(level.rate)),
        ),
        result=(
            ("bytes at the one server, in and out" if counts[0] == 1 else "bytes at the busiest server, in and out",
             size(workers * plan(counts[0]).largest_part * (recipe.gradient + recipe.weight))),
            ("exchange of a step, synchronous", seconds(prices[counts[0]].synchronous)),
            (f"all-reduce ({reduced.algorithm.replace('_', ' ')})", seconds(took)),
        ),
        tables=(GridTable("the busiest link, in a step", _COLUMNS, tuple(rows), optional=("asynchronous, at least",)),),
        remarks=(
            "t(V) are the seconds of V bytes over the busiest link, a server's or a worker's. Synchronous: all push, "
            "then all pull. Asynchronous, at least: both directions at once. `explain all-reduce` has the all-reduce.",
            "One server's link carries what all workers send: it is the bottleneck, n times that of a worker.",
            "As many servers as workers, each with its own link, spread it as a flat ring does; an all-reduce that "
            "first adds inside nodes sends less between them.",
            "Asynchronous workers do not wait for each other; with bounded staleness none is more than s steps ahead.",
            "`train` has no parameter servers; `shardwise bench parameter-server` runs them beside an all-reduce.",
        ),
        source=(
            "Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server (OSDI)",
            "Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (NIPS)",
            "Jiang et al. 2020, A Unified Architecture for Accelerating Distributed DNN Training (OSDI), section 3",
        ),
    )  # fmt: skip


def _powers(workers: int) -> list[int]:
    """A few powers of two below the number of workers, and that number."""
    powers = [1]
    while 2 * powers[-1] < workers:
        powers.append(2 * powers[-1])
    return sorted({*powers[:: max(1, len(powers) // 4)], workers})


def _row(plan: ServerPlan, price: ServerPrice) -> tuple[Value, ...]:
    ratio = price.synchronous / float(price.all_reduce.seconds) if float(price.all_reduce.seconds) else 0.0
    return (
        counted(plan.servers, "server"),
        number(plan.largest_part),
        size(plan.workers * plan.largest_part * plan.gradient_bytes),
        size(plan.workers * plan.largest_part * plan.weight_bytes),
        seconds(price.synchronous),
        number(ratio, f"{ratio:.1f}"),
        seconds(price.saturated),
    )

"""Parameter servers beside an all-reduce, with a job's numbers."""

from __future__ import annotations

from shardwise.cost.traffic.parameter_server import ServerPrice, server_price
from shardwise.layout.network import network
from shardwise.layout.servers import ServerPlan
from shardwise.report.explain.explanation import Explanation, GridTable, Value, number, rate, seconds, size
from shardwise.spec.job import Job
from shardwise.spec.parameters import parameter_count
from shardwise.spec.units import counted

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

"""A parallel dimension of a job: what it sends and why, with the job's numbers."""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost.analysis import Analysis
from shardwise.report.explain.explanation import Explanation, GridTable
from shardwise.report.explain.quantity import number, seconds, size

_THEORY = {
    "tp": Explanation(
        "Tensor parallelism",
        (
            "per layer and microbatch, without SP: 2 all-reduces forward and 2 backward of b·s·h·e bytes",
            "with SP: 2 all-gathers + 2 reduce-scatters each way, the same bytes, + 2 re-gathers for weight gradients",
        ),
        ("Shoeybi et al. 2019 (arXiv 1909.08053)", "Korthikanti et al. 2022 (arXiv 2205.05198)"),
        remarks=(
            "A column-parallel layer does not all-reduce its output; its input gradient is reduced.",
            "The row-parallel layer reduces its output.",
        ),
    ),
    "dp": Explanation(
        "Data parallelism",
        (
            "replicated: all-reduce of P·e bytes per step, 2(n−1)/n·P·e on the wire",
            "ZeRO-1, 2: reduce-scatter + all-gather, the same bytes; ZeRO-3: 1.5 times, gathers again every microbatch",
        ),
        ("Rajbhandari et al. 2020 (arXiv 1910.02054), section 7",),
        remarks=("ZeRO never gathers the full gradient: each rank updates its own shard and parameters are gathered.",),
    ),
    "pp": Explanation(
        "Pipeline parallelism",
        ("per stage boundary and microbatch: b·s·h·e bytes each way (divided by t with SP), one latency per message",),
        ("Narayanan et al. 2021 (arXiv 2104.04473)",),
        remarks=(
            "Interleaving sends v times as many messages. The bubble is explained by `shardwise explain bubble`.",
        ),
    ),
    "cp": Explanation(
        "Context parallelism",
        (
            "ring: c−1 point-to-point sends of 2·b·(s/c)·h_kv·e forward, twice that backward, under attention itself",
            "all-gather: 2·b·s·h_kv·e gathered forward, gathered and reduce-scattered backward",
            "Ulysses: all-to-all of q, k, v and the output, (2h + 2h_kv)·b·s/c·e, each way",
        ),
        ("Liu et al. 2023 (arXiv 2310.01889)", "Llama 3 (arXiv 2407.21783)", "Jacobs et al. 2023 (arXiv 2309.14509)"),
        remarks=("Training has no KV cache; context parallelism splits attention over the sequence.",),
    ),
    "ep": Explanation(
        "Expert parallelism",
        (
            "dispatch and combine, forward and backward: 4 all-to-alls of T·k·h·e bytes per rank and layer",
            "deduplicated: T·h·e·E[distinct nodes] between nodes, E = N(1 − (1 − 1/N)^k) for uniform routing",
        ),
        ("Lepikhin et al. 2020, GShard (arXiv 2006.16668)", "DeepSeek-V3 (arXiv 2412.19437), section 3.2.2"),
        remarks=("Expert ranks are those of one stage: expert_tp · ep · expert data parallelism = tp·cp·dp.",),
    ),
}


def explain_dimension(name: str, analysis: Analysis) -> Explanation:
    """The theory of a dimension and what it sends in this job."""
    theory, job = _THEORY[name], analysis.job
    traffics = analysis.dimension_traffics(name)
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
    strategy = job.strategy
    degrees = {"tp": strategy.tp, "cp": strategy.cp, "dp": strategy.data_parallel, "pp": strategy.pp, "ep": strategy.ep}
    return replace(
        theory,
        title=f"{theory.title} of {job.model.name} on {job.cluster.devices} × {job.cluster.device.name}",
        numbers=(
            ("b", "sequences of a microbatch", number(strategy.microbatch)),
            ("s", "tokens of a sequence", number(job.training.seq)),
            ("h", "hidden size", number(job.model.hidden)),
            ("h_kv", "width of keys", number(job.model.key_value_heads * job.model.head_size)),
            ("e", "bytes per element", number(job.training.recipe.communication)),
            *((one, "degree", number(degree)) for one, degree in degrees.items()),
            ("", "microbatches", number(job.microbatches)),
        ),
        result=(
            ("seconds per step", seconds(sum(t.seconds for t in traffics))),
            ("of them exposed in the predicted step", seconds(sum(t.added_seconds for t in traffics))),
            ("bytes the busiest device sends", size(sum(t.bytes_sent for t in traffics))),
        ),
        tables=(GridTable("in one step", columns, rows, words=3, optional=("network",)),) if rows else (),
        remarks=theory.remarks if rows else (f"This job has {name} 1: nothing is sent.", *theory.remarks),
    )

"""`shardwise bench`: collectives and their algorithms, one training step, or parameter servers, timed."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.api.calibration import cluster_of_ranks, named_cluster
from shardwise.api.quantities import amount, require_writable, whole_number, write_text
from shardwise.cli.arguments import add_field_argument, add_job_arguments, job_from, require_torch
from shardwise.cli.on_target import (
    EMULATE_HELP,
    WIRING_HELP,
    a_rank_for_each_device,
    add_run_device_argument,
    add_target_argument,
    run_on_target,
    target_of_verb,
)
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.collectives.schedule import CollectiveKind
from shardwise.engine.refuse import require_devices
from shardwise.interop.jobs import model_from
from shardwise.launch.pool import told_in_one_line
from shardwise.launch.preflight import require_cores
from shardwise.launch.targets.registry import LaunchTarget
from shardwise.report.console import versioned
from shardwise.report.progress import status
from shardwise.run.environment import Started, started
from shardwise.spec.clusters import cpu_hosts
from shardwise.spec.emulation import Emulation, cluster_of
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import dump_yaml
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes
from shardwise.spec.wiring import Wiring

if TYPE_CHECKING:
    from shardwise.launch.pool import Pool
    from shardwise.measure.collectives.request import CollectiveRequest, MeasuredCollective, MeasuredLevel


_EXAMPLE = """
shardwise bench collectives --processes 2 --kinds all_reduce --max-bytes 1MiB
shardwise bench collectives --emulate 2x2,1Gbit,1ms --kinds all_reduce --algorithms backend,hierarchical --out bench.csv
shardwise bench collectives --on hosts.txt --kinds all_reduce --algorithms backend --wiring wiring.yaml
torchrun --nproc-per-node 8 -m shardwise bench collectives --run-device cuda --cluster dgx-h100:1
"""
WHAT = ("collectives", "step", "parameter-server")
LARGEST_BYTES = 2**30
COPIES = 12  # of the largest size that a rank may hold: input, output, staging, reference


def run(arguments: list[str]) -> int:
    if arguments[:1] == ["step"]:
        return _run_step(arguments[1:])
    if arguments[:1] == ["parameter-server"]:
        return _run_servers(arguments[1:])
    parser = _parser()
    parsed = parser.parse(arguments)
    if parsed.what not in WHAT:
        raise SpecError("bench", f"{shown(parsed.what)} cannot be measured", nearest_name(parsed.what, WHAT))
    require_torch("bench")
    here = started()
    target = target_of_verb(parsed.on, here)
    if target is not None:
        return _on_target(target, parsed, arguments)
    _check(parsed, here)
    cluster = _cluster(parsed, here)
    wanted = _requests(parsed, cluster)
    if here is not None:
        measured, between = _measured_as_rank(parsed, here, wanted)
        return _report(parsed, measured, between) if here.rank == 0 else 0
    with told_in_one_line(), status("starting", quiet=parsed.json) as update:
        measured, between = _measured_here(parsed, cluster, wanted, update)
    return _report(parsed, measured, between)


def _measured_here(
    parsed: Namespace, cluster: Cluster, wanted: Sequence[CollectiveRequest], update: Callable[[str], None]
) -> tuple[list[MeasuredCollective], Wiring | None]:
    """Measured on processes of this machine; all pairs of virtual nodes, too, if ``--wiring`` asks for them.

    Virtual nodes have the names of the hosts in the cluster's wiring, if it has enough of them.
    """
    from shardwise.measure.calibrate.ranks import PoolRanks
    from shardwise.measure.collectives.pairs import measured_matrix, wiring_of
    from shardwise.measure.collectives.run import measure_in

    measured: list[MeasuredCollective] = []
    with _pool(parsed, cluster.wiring) as pool:
        for number, request in enumerate(wanted, 1):
            kind = request.kind.value.replace("_", "-")
            update(f"{kind} over {request.level.name} ({number} of {len(wanted)})")
            measured += measure_in(pool, request)
        if parsed.wiring is None:
            return measured, None
        emulation = Emulation.parse(parsed.emulate, "--emulate")
        nodes = emulation.nodes
        update(f"every two of {nodes} nodes")
        matrix = measured_matrix(PoolRanks(pool, emulation.world, emulation.ranks_per_node), nodes, "cpu")
    known = () if cluster.wiring is None else cluster.wiring.hosts
    hosts = known[:nodes] if len(known) >= nodes else [f"node-{node}" for node in range(nodes)]
    return measured, wiring_of(hosts, matrix, _source())


def _measured_as_rank(
    parsed: Namespace, here: Started, wanted: Sequence[CollectiveRequest]
) -> tuple[list[MeasuredCollective], Wiring | None]:
    """Measured by the ranks that a launcher started, of which this process is one."""
    from shardwise.measure.calibrate.ranks import hosts_of, node_names, started_ranks
    from shardwise.measure.collectives.pairs import measured_matrix, wiring_of
    from shardwise.measure.collectives.run import measure_as_rank

    with started_ranks(here) as ranks:
        hosts = None if parsed.wiring is None else node_names(hosts_of(ranks), here.ranks_per_host)
        measured = ranks.run(measure_as_rank, wanted, parsed.run_device)[0]
        if hosts is None:
            return measured, None
        return measured, wiring_of(hosts, measured_matrix(ranks, len(hosts), parsed.run_device), _source())


def _source() -> str:
    return f"shardwise bench collectives, {date.today().isoformat()}"


def _on_target(target: LaunchTarget, parsed: Namespace, arguments: list[str]) -> int:
    if parsed.emulate is not None:
        raise SpecError("--emulate", "cannot be combined with --on", "leave one of the two out")
    job = a_rank_for_each_device(target, parsed.cluster, parsed.run_device)
    return run_on_target(target, job, "bench", arguments)


def _parser() -> Parser:
    parser = Parser(
        "bench",
        "Measures collectives: every algorithm that has a schedule and the backend's own, from 8 B on, each result "
        "checked; per network level and for the whole world. Bandwidths by the definitions of nccl-tests. "
        "`shardwise bench step --help`: one training step beside its prediction. "
        "`shardwise bench parameter-server --help`: parameter servers beside an all-reduce.",
        _EXAMPLE,
        "--kinds --algorithms --min-bytes --max-bytes --repeats --processes --run-device --on --out --picture",
    )
    parser.add_argument("what", metavar="collectives", help="what to measure")
    parser.add_argument("--kinds", metavar="LIST", help="such as all_reduce,all_gather (default: all)")
    parser.add_argument("--algorithms", metavar="LIST", help="such as backend,ring,auto (default: all)")
    parser.add_argument("--levels", metavar="LIST", help="network levels, and world (default: all)")
    parser.add_argument("--min-bytes", metavar="SIZE", help="the smallest size (default: 8 B)")
    parser.add_argument("--max-bytes", metavar="SIZE", help="the largest size (default: what fits, at most 1 GiB)")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed runs of each size (default 10)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="untimed runs first (default 2)")
    parser.add_argument("--time-limit", default="3s", metavar="TIME", help="time limit; for one size (default 3s)")
    add_field_argument(parser, "--cluster", "; to predict for (default laptop)")
    where = parser.add_argument_group("where it runs")
    where.add_argument("--processes", type=int, default=2, metavar="N", help="processes on this machine (default 2)")
    where.add_argument("--emulate", metavar="NODES", help=EMULATE_HELP)
    add_run_device_argument(where, "; under a launcher or with --on (default cpu)", "cpu")
    add_target_argument(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="FILE", help="where to write the output; a CSV of every figure, in SI units")
    output.add_argument("--picture", metavar="FILE", help="SVG file to write; measured and predicted time over size")
    output.add_argument("--wiring", metavar="FILE", help=f"{WIRING_HELP}; measures every pair of nodes too")
    add_output_arguments(parser)
    return parser


def _check(parsed: Namespace, here: Started | None) -> None:
    _require_one_or_more(parsed, "repeats", "warmup")
    parsed.time_limit = amount(parsed.time_limit, "seconds", "--time-limit", "3s")
    for flag, path in (("--out", parsed.out), ("--picture", parsed.picture), ("--wiring", parsed.wiring)):
        if path is not None and (here is None or here.rank == 0):
            require_writable(Path(path), flag)
    if parsed.wiring is not None and (parsed.emulate is None if here is None else here.hosts == 1):
        raise SpecError("--wiring", "is for several nodes", "use --emulate or --on, or start it on several hosts")
    if here is not None:
        require_devices(parsed.run_device, here.ranks_per_host)
        return
    if parsed.run_device == "cuda":
        remedy = "torchrun --nproc-per-node N -m shardwise ..., or --on TARGET"
        raise SpecError("--run-device", "cuda is for ranks that a launcher starts", remedy)
    if parsed.emulate is None:
        require_cores("--processes", parsed.processes, "give fewer, or start it on several hosts")


def _require_one_or_more(parsed: Namespace, *names: str) -> None:
    for name in names:
        if getattr(parsed, name) < 1:
            raise SpecError(f"--{name}", f"{getattr(parsed, name)} is too few", "give 1 or more")


def _cluster(parsed: Namespace, here: Started | None) -> Cluster:
    if parsed.emulate is not None:
        emulation = Emulation.parse(parsed.emulate, "--emulate")
        base = named_cluster(parsed.cluster or "laptop")
        described = parsed.cluster is not None and base.devices == emulation.world and len(base.levels) > 1
        return base if described else cluster_of(emulation, base)
    ranks = parsed.processes if here is None else here.world
    if ranks < 2:
        raise SpecError("--processes", f"{ranks} is too few: a collective needs 2 ranks or more", "give 2 or more")
    if parsed.cluster is None and here is not None and here.hosts > 1:
        return cpu_hosts(here.hosts, here.ranks_per_host)
    if parsed.cluster is None:
        return named_cluster(f"laptop:{ranks}")
    return cluster_of_ranks(parsed.cluster, ranks)


def _requests(parsed: Namespace, cluster: Cluster) -> list[CollectiveRequest]:
    from shardwise.measure.collectives.request import SMALLEST_BYTES, levels_of, requests, sizes_between

    smallest = _bytes(parsed.min_bytes, "--min-bytes", SMALLEST_BYTES)
    largest = _bytes(parsed.max_bytes, "--max-bytes", _largest(cluster.devices))
    if started() is None:
        _require_room(largest, cluster.devices)
    if smallest > largest:
        raise SpecError("--min-bytes", f"{smallest} B is more than the largest, {largest} B", "give less")
    kinds = [CollectiveKind.parse(kind) for kind in parsed.kinds.split(",")] if parsed.kinds else list(CollectiveKind)
    algorithms = tuple(name.strip() for name in _names(parsed.algorithms)) if parsed.algorithms else None
    wanted = list(
        requests(
            cluster, _levels(parsed, levels_of(cluster)), kinds, algorithms, sizes_between(smallest, largest),
            warm_up=parsed.warmup, repeats=parsed.repeats, most_seconds=parsed.time_limit,
        )
    )  # fmt: skip
    if not wanted:
        raise SpecError("--algorithms", f"{parsed.algorithms} has no schedule there", "`shardwise list collectives`")
    return wanted


def _names(text: str) -> list[str]:
    """Names split at commas outside parentheses: "backend,hierarchical(ring,ring)" are two."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _levels(parsed: Namespace, levels: list[MeasuredLevel]) -> list[MeasuredLevel]:
    if parsed.levels is None:
        return levels
    by_name = {level.name: level for level in levels}
    names = parsed.levels.split(",")
    for name in names:
        if name not in by_name:
            remedy = "choose from " + ", ".join(by_name)
            raise SpecError("--levels", f"{shown(name)} is not a level of this network", remedy)
    return [by_name[name] for name in names]


def _bytes(text: str | None, field: str, otherwise: int) -> int:
    return otherwise if text is None else math.ceil(amount(text, "bytes", field, "1MiB"))


def _require_room(size: int, ranks: int) -> None:
    """Raises SpecError if what the ranks send and receive exceeds this machine's memory."""
    from shardwise.measure.verify import available_bytes

    free = available_bytes()
    if free is not None and 2 * size * ranks > free:
        needed, there = readable_bytes(2 * size * ranks), readable_bytes(free)
        raise SpecError("--max-bytes", f"{ranks} ranks need at least {needed}, {there} are free", "give less")


def _largest(ranks: int) -> int:
    from shardwise.measure.verify import available_bytes

    free = available_bytes()
    room = LARGEST_BYTES if free is None else free // (COPIES * ranks)
    return max(1024, 1 << min(LARGEST_BYTES, room).bit_length() - 1)


def _pool(parsed: Namespace, wiring: Wiring | None) -> Pool:
    from shardwise.launch.emulate.network import EmulatedPool, require_emulation
    from shardwise.launch.pool import Pool
    from shardwise.measure.collectives.run import PRELOAD

    if parsed.emulate is None:
        return Pool(PRELOAD)
    require_emulation()
    return EmulatedPool(Emulation.parse(parsed.emulate, "--emulate"), PRELOAD, wiring)


def _report(parsed: Namespace, measured: Sequence[MeasuredCollective], between: Wiring | None) -> int:
    from shardwise.report.bench import collectives_picture, measured_csv, measured_data, measured_page

    for flag, path, text in (("--out", parsed.out, measured_csv), ("--picture", parsed.picture, collectives_picture)):
        if path is not None:
            write_text(path, text(measured), flag)
    if between is not None:
        write_text(parsed.wiring, dump_yaml(between.to_dict()), "--wiring")
    show(parsed, lambda: measured_page(measured, between), lambda: measured_data(measured))
    return 0 if all(row.right for row in measured) else 1


# -- `bench step`: one training step on this machine's device, beside its prediction -----------------


STEPS, WARMUP = 10, 5
_STEP_EXAMPLE = """
shardwise bench step --model tiny --global-batch 4 --microbatch 4 --seq 128 --precision fp32 --steps 5
shardwise bench step --model gpt2 --global-batch 8 --microbatch 8 --seq 1024 --compile --json
torchrun --nproc-per-node 8 -m shardwise bench step --model llama3-8b --cluster dgx-h100:1 --zero 3 --global-batch 8
"""
_STEP_FIRST = "--model --cluster --global-batch --microbatch --seq --precision --compile --steps --warmup --on"
_STEP = """Trains a model for a few steps on random tokens, as `train` would, and prints the time of a step, tokens/s,
MFU and memory beside what the planner predicts. Without --cluster the device is this machine's GPU, or its CPU."""


def _run_step(arguments: list[str]) -> int:
    parser = Parser("bench step", _STEP, _STEP_EXAMPLE, _STEP_FIRST)
    add_job_arguments(parser)
    parser.add_argument("--compile", action="store_true", help="compile every layer (training.compile)")
    parser.add_argument("--graphs", choices=("auto", "true", "false"), help="one CUDA graph per step (training.graphs)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"steps to train; all are timed (default {STEPS})"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=WARMUP,
        metavar="N",
        help=f"untimed runs first; of the step (default {WARMUP})",
    )
    nvtx = "mark steps, their phases and layers as NVTX ranges for nsys; the timed ones"
    parser.add_argument("--nvtx", action="store_true", help=nvtx)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed; of weights and tokens (default 0)"
    )
    add_target_argument(parser)
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    _require_one_or_more(parsed, "steps", "warmup")
    require_torch("bench")
    from shardwise.engine.refuse import require_nvtx
    from shardwise.measure.step import measure_step, require_measurable
    from shardwise.report.bench import step_data, step_page

    here = started()
    target = target_of_verb(parsed.on, here)
    if target is not None and parsed.job is None and parsed.cluster is None:
        raise SpecError("--cluster", "is missing: it says how many ranks", "such as dgx-h100:2")
    _complete(parsed, here)
    job = job_from(parsed, runs_here=True)
    if target is not None:
        return run_on_target(target, job, "bench step", arguments)
    if parsed.nvtx:
        require_nvtx(job, "--nvtx")
    require_measurable(job, here)
    quiet = parsed.json or (here is not None and here.rank > 0)
    with status("starting", quiet=quiet) as update:
        measured = measure_step(
            job, here, steps=parsed.steps, warmup=parsed.warmup, seed=parsed.seed, nvtx=parsed.nvtx, on_progress=update
        )  # fmt: skip
    if here is None or here.rank == 0:
        show(parsed, lambda: step_page(measured), lambda: versioned("bench step", step_data(measured)))
    return 0


def _complete(parsed: Namespace, here: Started | None) -> None:
    """Adds this machine's devices if no cluster is given, and the flags that set fields of the job's training."""
    from shardwise.measure.step import cluster_name_here, device_type_here

    parsed.set += ["training.compile=true"] if parsed.compile else []
    parsed.set += [f"training.graphs={parsed.graphs}"] if parsed.graphs else []
    if parsed.job is None and parsed.cluster is None:
        parsed.cluster = cluster_name_here(device_type_here())
        parsed.gpus = parsed.gpus or (1 if here is None else here.world)


# -- `bench parameter-server`: parameter servers beside an all-reduce, on local processes ------------


_SERVERS_EXAMPLE = """
shardwise bench parameter-server --workers 2 --steps 8
shardwise bench parameter-server --workers 4 --servers 2 --staleness 2 --slow 50ms --picture losses.svg
"""
_WAYS = """Trains one model in three ways on processes of this machine: by an all-reduce, as `train` does; by parameter
servers that wait for all workers; and by servers that do not, with workers at most --staleness steps apart. Prints the
losses, the time of a step, how equal the weights are, and the bytes at the servers beside the plan's. The exit status
is 1 if synchronous servers end in other weights, or bytes or steps differ from the plan."""
RATES = {"sgd": 0.5, "adamw": 1e-3}
_MOST_STALENESS = 10**6


def _run_servers(arguments: list[str]) -> int:
    parser = Parser("bench parameter-server", _WAYS, _SERVERS_EXAMPLE)
    parser.add_argument("--workers", default="2", metavar="N", help="processes that compute gradients (default 2)")
    parser.add_argument("--servers", default="1", metavar="N", help="servers that share the weights (default 1)")
    ahead = "steps that an asynchronous worker may be ahead of the slowest (default 2)"
    parser.add_argument("--staleness", default="2", metavar="N", help=ahead)
    parser.add_argument("--steps", default="20", metavar="N", help="steps to train; with each method (default 20)")
    add_field_argument(parser, "--model", "; a dense one", "tiny")
    add_field_argument(parser, "--global-batch", default="8")
    add_field_argument(parser, "--seq", default="64")
    add_field_argument(parser, "--optimizer", "; sgd or adamw here", "sgd")
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in RATES.items())
    parser.add_argument("--learning-rate", metavar="RATE", help=f"peak learning rate (default {rates})")
    parser.add_argument("--slow", metavar="TIME", help="extra time per step for the last worker")
    add_field_argument(parser, "--cluster", "; whose network is priced", "laptop")
    parser.add_argument("--picture", metavar="FILE", help="SVG file to write; the loss of each way, step by step")
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    require_torch("bench")
    if (here := started()) is not None:
        raise SpecError("bench", f"{here.launcher} has started this as a rank", "start it alone: its ranks are local")
    workers, servers = (whole_number(getattr(parsed, name), f"--{name}") for name in ("workers", "servers"))
    require_cores("--workers", workers + servers, "use fewer workers or servers")
    if parsed.picture is not None:
        require_writable(Path(parsed.picture), "--picture")
    return _compare(parsed, workers, servers)


def _compare(parsed: Namespace, workers: int, servers: int) -> int:
    from shardwise.measure.parameter_server import ServerRequest, compare_servers
    from shardwise.report.bench import losses_picture, servers_data, servers_page

    slow = 0.0 if parsed.slow is None else amount(parsed.slow, "seconds", "--slow", "50ms")
    request = ServerRequest(
        _job(parsed, workers), servers, _staleness(parsed.staleness), whole_number(parsed.steps, "--steps"), slow
    )  # fmt: skip
    request.plan  # noqa: B018  # refused before a process starts
    with told_in_one_line(), status("starting", quiet=parsed.json) as update:
        comparison = compare_servers(request, update)
    if parsed.picture is not None:
        write_text(parsed.picture, losses_picture(comparison), "--picture")
    data = versioned("bench parameter-server", servers_data(comparison))
    show(parsed, lambda: servers_page(comparison), lambda: data)
    for fault in comparison.faults:
        print(f"shardwise: {fault}", file=sys.stderr)
    return 1 if comparison.faults else 0


def _staleness(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _MOST_STALENESS:
        raise SpecError("--staleness", f"{shown(text)} is not a number of steps", "write 0 or more, such as 2")
    return int(text)


def _job(parsed: Namespace, workers: int) -> Job:
    if parsed.optimizer not in RATES:
        raise SpecError("--optimizer", f"{shown(parsed.optimizer)} is not compared here", f"use {' or '.join(RATES)}")
    rate = RATES[parsed.optimizer]
    if parsed.learning_rate is not None:
        rate = amount(parsed.learning_rate, "count", "--learning-rate", "0.1")
    optimization = {"learning_rate": rate, "clip_norm": None, "decay": 0.0, "epsilon": 1e-5}
    batch, seq = whole_number(parsed.global_batch, "--global-batch"), whole_number(parsed.seq, "--seq")
    if batch % workers:
        raise SpecError("--global-batch", f"{batch} sequences do not divide over {workers} workers", "use a multiple")
    return Job.from_dict(
        {
            "model": model_from(parsed.model),
            "cluster": named_cluster(parsed.cluster).with_devices(workers),
            "strategy": {"dp": workers, "zero": 0, "microbatch": batch // workers},
            "training": {
                "global_batch": batch,
                "seq": seq,
                "precision": "fp32",
                "optimizer": parsed.optimizer,
                "optimization": optimization,
            },
        }
    )

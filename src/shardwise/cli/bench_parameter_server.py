"""`shardwise bench parameter-server`: parameter servers beside an all-reduce, on local processes."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from shardwise.api.calibration import named_cluster
from shardwise.api.quantities import amount, require_writable, write_text
from shardwise.cli.arguments import add_field_argument
from shardwise.cli.inputs import model_from, require_torch, whole_number
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.launch.pool import told_in_one_line
from shardwise.launch.preflight import require_cores
from shardwise.report.formats import versioned
from shardwise.report.progress import status
from shardwise.run.environment import started
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job

_EXAMPLE = """
shardwise bench parameter-server --workers 2 --steps 8
shardwise bench parameter-server --workers 4 --servers 2 --staleness 2 --slow 50ms --picture losses.svg
"""
_DOES = """Trains one model in three ways on processes of this machine: by an all-reduce, as `train` does; by parameter
servers that wait for all workers; and by servers that do not, with workers at most --staleness steps apart. Prints the
losses, the time of a step, how equal the weights are, and the bytes at the servers beside the plan's. The exit status
is 1 if synchronous servers end in other weights, or bytes or steps differ from the plan."""
RATES = {"sgd": 0.5, "adamw": 1e-3}
_MOST_STALENESS = 10**6


def run(arguments: list[str]) -> int:
    parser = Parser("bench parameter-server", _DOES, _EXAMPLE)
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
    parser.add_argument("--learning-rate", metavar="RATE", help=f"default {rates}")
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
    again = "run it again; a process that the system killed needs more memory"
    with told_in_one_line(again), status("starting", quiet=parsed.json) as update:
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

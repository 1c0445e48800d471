"""`shardwise status`: how a run is doing, shown once or repeatedly, or served to Prometheus."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading

from shardwise.api.observation import observed_folder, status, statuses
from shardwise.api.quantities import amount
from shardwise.cli.arguments import port_number
from shardwise.cli.output import add_output_arguments, form_of, show
from shardwise.cli.parser import Parser
from shardwise.report.console import console
from shardwise.spec.errors import SpecError

_EXAMPLE = """
shardwise status runs/last
shardwise status runs/last --watch
"""
_DOES = """How a run is doing: its state, step, loss, speed, step time beside the plan, memory, slow ranks, restarts,
last commit, goodput, time left. It reads what the run records: while it goes on, after it, or after it was killed,
on this machine or any that sees the folder. Of checkpoints alone, such as s3://bucket/run, it shows the newest.
The exit status is 1 if the run failed or was killed."""
EVERY = "2s"


def run(arguments: list[str]) -> int:
    parser = Parser("status", _DOES, _EXAMPLE)
    parser.add_argument("run", help="the run's folder, or where its checkpoints are; runs/last is the newest run")
    watch = f"show it again every TIME (default {EVERY}) until the run is over; off a terminal, a line each time"
    parser.add_argument("--watch", nargs="?", const=EVERY, metavar="TIME", help=watch)
    port = "serve the state of the run to Prometheus on 127.0.0.1; until interrupted; 0 is any free port"
    parser.add_argument("--metrics-port", metavar="PORT", help=port)
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    if parsed.metrics_port is not None:
        return _serve(parsed)
    if parsed.watch is not None:
        return _watch(parsed, amount(parsed.watch, "seconds", "--watch", EVERY))
    result = status(parsed.run)
    show(parsed, lambda: result.page, result.to_dict)
    return 0 if result.ok else 1


def _watch(parsed: argparse.Namespace, seconds: float) -> int:
    """Redraws the page on a terminal; prints a line each time elsewhere."""
    if form_of(parsed) != "text":
        raise SpecError("--watch", f"cannot be combined with --{form_of(parsed)}", "leave one of them out")
    for result in statuses(parsed.run, seconds):
        if parsed.json:
            print(json.dumps(result.to_dict()), flush=True)
        elif sys.stdout.isatty():
            console().clear()
            result.page.print()
        else:
            print(result.line, flush=True)
        if not result.alive:
            return 0 if result.ok else 1
    return 0


def _serve(parsed: argparse.Namespace) -> int:
    from shardwise.launch.observe.prometheus import MetricsServer

    if parsed.watch is not None or parsed.json or form_of(parsed) != "text":
        raise SpecError("--metrics-port", "prints nothing but its address", "leave out --watch, --json and the others")
    port, folder = port_number(parsed.metrics_port, "⟨metrics_port⟩"), observed_folder(parsed.run)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with MetricsServer(port, "--metrics-port") as server, server.serving(folder):
        print(f"metrics at {server.url}", flush=True)
        try:
            ended.wait()
        except KeyboardInterrupt:
            return 130
    return 0

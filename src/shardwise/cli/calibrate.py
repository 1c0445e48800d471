"""`shardwise calibrate`: measures a machine, and writes the cluster to plan with."""

from __future__ import annotations

from argparse import Namespace

from shardwise.api.calibration import CLUSTER, RECUT, calibrate, recut
from shardwise.cli.arguments import add_field_argument, keywords, require_torch
from shardwise.cli.on_target import (
    EMULATE_HELP,
    a_rank_for_each_device,
    add_run_device_argument,
    add_target_argument,
    run_on_target,
    target_of_verb,
)
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.launch.targets.registry import LaunchTarget
from shardwise.report.progress import status
from shardwise.run.environment import started
from shardwise.spec.errors import SpecError

_EXAMPLE = """
shardwise calibrate --processes 2 --out cluster.yaml
shardwise calibrate --on hosts.txt --cluster dgx-h100:2 --run-device cuda
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host-0:29400 -m shardwise calibrate --cluster dgx-h100:2
"""
_DOES = """Measures this machine (matmuls, attention, memory, whole steps, collectives of every level, disk), or the
hosts that a launcher has started it on, and writes a cluster file that `plan` reads. --from RUN: rebalances the stages
of a profiled run by the measured times of stages, layers and ranks, and writes the new job."""


def run(arguments: list[str]) -> int:
    parser = Parser("calibrate", _DOES, _EXAMPLE)
    parser.add_argument("--from", dest="run", metavar="RUN", help="the folder of a run with --profile, or runs/last")
    parser.add_argument(
        "--out", metavar="FILE", help=f"where to write the output (default {CLUSTER}; with --from {RECUT} in the run)"
    )
    add_field_argument(parser, "--cluster", "; what this hardware is (default: by its GPUs, or laptop)")
    parser.add_argument("--processes", metavar="N", help="processes on this machine (default: one per core)")
    parser.add_argument("--emulate", metavar="NODES", help=EMULATE_HELP)
    add_run_device_argument(parser, "; the device to measure (default: GPUs if any; with --on cpu)", also=("auto",))
    parser.add_argument(
        "--only", metavar="PARTS", help="measure only some of device,host,links,storage; the rest stays as it was"
    )
    add_target_argument(parser)
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    require_torch("calibrate")
    if parsed.run is not None:
        for name in ("cluster", "processes", "emulate", "only", "on"):
            if getattr(parsed, name) is not None:
                raise SpecError(f"--{name}", "cannot be combined with --from", "leave one of the two out")
        cut = recut(parsed.run, out=parsed.out)
        show(parsed, lambda: cut.page, cut.to_dict)
        return 0
    here = started()
    target = target_of_verb(parsed.on, here)
    if target is not None:
        return _on_target(target, parsed, arguments)
    with status("starting", quiet=here is not None and here.rank > 0) as update:
        result = calibrate(**keywords(calibrate, parsed), on_progress=lambda text: update(f"measuring {text}"))
    if result.is_written:
        show(parsed, lambda: result.page, result.to_dict)
    return 0


def _on_target(target: LaunchTarget, parsed: Namespace, arguments: list[str]) -> int:
    for name in ("processes", "emulate"):
        if getattr(parsed, name) is not None:
            raise SpecError(f"--{name}", "cannot be combined with --on", "leave one of the two out")
    device = "cuda" if parsed.run_device == "cuda" else "cpu"
    job = a_rank_for_each_device(target, parsed.cluster, device)
    return run_on_target(target, job, "calibrate", arguments, device)

"""`shardwise calibrate`: measures a machine, and writes the cluster to plan with."""

from __future__ import annotations

from rich.console import Console

from shardwise.api.calibration import CLUSTER, RECUT, calibrate, recut
from shardwise.cli.arguments import Parser
from shardwise.cli.inputs import require_torch
from shardwise.cli.output import add_output_arguments, show
from shardwise.launch.torchrun import started
from shardwise.spec.errors import SpecError

_EXAMPLE = """
shardwise calibrate --processes 2 --out cluster.yaml
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint host-0:29400 -m shardwise calibrate --cluster dgx-h100:2
"""
_DOES = """Measures this machine (matmuls, attention, memory, whole steps, collectives of every level, disk), or the
hosts that torchrun has started it on, and writes a cluster file that `plan` reads. --from RUN: the times of stages,
layers and ranks of a profiled run become a job with rebalanced stages, with the expected gain."""


def run(arguments: list[str]) -> int:
    parser = Parser("calibrate", _DOES, _EXAMPLE)
    parser.add_argument("--from", dest="run", metavar="RUN", help="the folder of a run with --profile, or runs/last")
    parser.add_argument("--out", metavar="FILE", help=f"where it goes (default {CLUSTER}; --from: {RECUT} in the run)")
    parser.add_argument("--cluster", metavar="NAME", help="what this hardware is, if known (default laptop)")
    parser.add_argument("--processes", metavar="N", help="CPU processes to run at once (default: one per core)")
    parser.add_argument("--emulate", metavar="LINK", help="measure virtual nodes, such as 2x2,1Gbit,1ms (needs root)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: GPUs if any)")
    parser.add_argument("--only", metavar="PARTS", help="some of device,links,storage; the rest stays as it is")
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    require_torch("calibrate")
    if parsed.run is not None:
        for name in ("cluster", "processes", "emulate", "only"):
            if getattr(parsed, name) is not None:
                raise SpecError(f"--{name}", "cannot be combined with --from", "leave one of the two out")
        cut = recut(parsed.run, out=parsed.out)
        show(parsed, lambda: cut.page, cut.to_dict)
        return 0
    here = started()
    with Console(stderr=True, quiet=here is not None and here.rank > 0).status("") as status:
        found = calibrate(
            out=parsed.out or CLUSTER,
            cluster=parsed.cluster,
            processes=parsed.processes,
            emulate=parsed.emulate,
            device=parsed.device,
            only=parsed.only,
            on_progress=lambda text: status.update(f"Measuring {text}"),
        )
    if found.is_written:
        show(parsed, lambda: found.page, found.to_dict)
    return 0

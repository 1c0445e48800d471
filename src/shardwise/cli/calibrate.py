"""`shardwise calibrate`: what was measured becomes what is planned with."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.cli.arguments import Parser
from shardwise.cli.inputs import require_torch
from shardwise.spec.errors import SpecError

_EXAMPLE = """
shardwise calibrate --from runs/demo --out job.yaml
"""
RECUT = "recut.yaml"


def run(arguments: list[str]) -> int:
    parser = Parser(
        "calibrate",
        "Turns what was measured into what is planned with. --from RUN: the times of stages, layers and ranks of a "
        "profiled run become a job whose stages are cut again, and what that would gain.",
        _EXAMPLE,
    )
    parser.add_argument("--from", dest="run", metavar="RUN", help="the folder of a run with --profile, or runs/last")
    parser.add_argument("--out", metavar="FILE", help=f"where the job goes (default: {RECUT} in the run's folder)")
    parser.add_argument("--json", action="store_true", help="the result for a machine")
    parsed = parser.parse(arguments)
    require_torch("calibrate")
    if parsed.run is None:
        raise SpecError("--from", "is missing", "name a run that was profiled, such as runs/last")
    return _recut(parsed.run, parsed.out, as_json=parsed.json)


def _recut(run_name: str, out: str | None, *, as_json: bool) -> int:
    from shardwise.measure.compare.run import profiled_run
    from shardwise.measure.recut import recut
    from shardwise.report.recut import print_recut, recut_data

    found = profiled_run(run_name)
    result = recut(found.job, found.measured)
    path = found.folder.path / RECUT if out is None else Path(out)
    try:
        path.write_text(result.new_run().to_yaml(), encoding="utf-8")
    except OSError as error:
        raise SpecError("--out", f"{path} cannot be written ({error.strerror})", "give another name") from None
    if as_json:
        print(json.dumps({**recut_data(result), "written": str(path)}, indent=2))
    else:
        print_recut(result, path)
    return 0

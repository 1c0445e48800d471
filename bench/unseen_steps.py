"""Steps of one GPU that no calibration has seen, beside what is predicted: by the catalogue, and once calibrated.

    PYTHONPATH=src python bench/unseen_steps.py --calibrated cluster.yaml --out bench/results/unseen-steps-h200.json

``cluster.yaml`` is what `shardwise calibrate` writes on the same machine; without it only the catalogue's prediction is
shown. A step that does not run is listed with the reason. The steps are the rows of a YAML file, ``unseen_steps.yaml``
or another ``--configurations``: dense models and mixtures, sequences of 1k to 32k tokens, all kinds of recompute,
compiled or not, bf16 and FP8, one or several microbatches. A row has a model, the number of its ``layers`` (all if left
out), ``sequences`` of a step with ``seq`` tokens each, those of a ``microbatch`` (all if left out), and any other field
of a job by its path, such as ``training.compile``.

    PYTHONPATH=src python bench/unseen_steps.py --measured bench/results/unseen-steps-h200.json --calibrated other.yaml

predicts the steps that were measured before once more, on any machine: after a change of prices or of a calibration.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.api.given import arguments_of
from shardwise.api.inputs import job_from
from shardwise.cost.analysis import Analysis, analyze
from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_yaml
from shardwise.spec.job import Job

CONFIGURATIONS = Path(__file__).with_suffix(".yaml")
HEATED_SECONDS = 2.0  # by steps that do not count: training goes on for hours
_SHORT = {
    "layers": "model.layers",
    "sequences": "training.global_batch",
    "seq": "training.seq",
    "microbatch": "strategy.microbatch",
}
Configuration = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """What one configuration took on a GPU of ``cluster``."""

    configuration: Configuration
    cluster: str
    seconds: float
    peak_bytes: int
    graphs: str


@dataclass(frozen=True)
class Compared:
    """A measured step beside its predictions, as relative errors; ``calibrated_error`` is None without a cluster."""

    name: str
    measured: Measured
    catalogue_error: float
    calibrated_error: float | None
    memory_error: float


def job_of(row: Configuration, cluster: str) -> Job:
    given = {"microbatch": row["sequences"], **row}
    fields = {_SHORT.get(name, name): value for name, value in given.items() if name != "model"}
    return job_from(arguments_of({"model": row["model"], "cluster": cluster, "gpus": 1, **fields}), runs_here=True)[0]


def name_of(row: Configuration) -> str:
    words = [row["model"], *([f"{row['layers']} layers"] if "layers" in row else [])]
    words.append(f"{row['sequences']} x {row['seq']:,}")
    words += [f"microbatch {row['microbatch']}"] if "microbatch" in row else []
    return ", ".join([*words, *(_word(name, row[name]) for name in row if name not in _SHORT and name != "model")])


def _word(field: str, value: object) -> str:
    last = {"compile": "compiled"}.get(field.split(".")[-1], field.split(".")[-1])
    return last if value is True else f"no {last}" if value is False else f"{last} {value}"


def measured(row: Configuration, steps: int) -> Measured:
    from shardwise.measure.step import cluster_name_here, measure_step

    cluster = cluster_name_here("cuda")
    job = job_of(row, cluster)
    found = measure_step(job, None, steps=steps, warmup=5, warmup_seconds=HEATED_SECONDS, on_progress=lambda text: None)
    if not math.isfinite(found.last_loss):
        raise RuntimeError(f"its loss is {found.last_loss}: the time does not count")
    return Measured(dict(row), cluster, found.median_seconds, found.peak_bytes, found.graphs)


def compared(one: Measured, calibrated: str | None) -> Compared:
    priced = analyze(job_of(one.configuration, one.cluster))
    error = None if calibrated is None else _error(analyze(job_of(one.configuration, calibrated)), one)
    held = priced.memory.total - priced.memory.allowance
    return Compared(name_of(one.configuration), one, _error(priced, one), error, held / one.peak_bytes - 1)


def _error(priced: Analysis, one: Measured) -> float:
    return priced.predicted_seconds / one.seconds - 1


def line(one: Compared) -> str:
    later = "" if one.calibrated_error is None else f", calibrated {one.calibrated_error:+6.1%}"
    times = f"{1e3 * one.measured.seconds:8.1f} ms, catalogue {one.catalogue_error:+6.1%}{later}"
    memory = f"{one.measured.peak_bytes / 1e9:5.1f} GB, memory {one.memory_error:+6.1%}"
    return f"{one.name:66} {times}, {memory}, graphs {one.measured.graphs}"


def summary(title: str, errors: Sequence[float]) -> str:
    worst = max(errors, key=abs)
    mean, bias = statistics.fmean(abs(one) for one in errors), statistics.fmean(errors)
    return f"{title}: mean {mean:.1%}, worst {worst:+.1%}, bias {bias:+.1%} of {len(errors)}"


def show(rows: Sequence[Compared]) -> None:
    print(summary("catalogue", [one.catalogue_error for one in rows]))
    calibrated = [one.calibrated_error for one in rows if one.calibrated_error is not None]
    if calibrated:
        print(summary("calibrated", calibrated))
    print(summary("memory", [one.memory_error for one in rows]))


def all_measured(rows: Sequence[Configuration], steps: int, seconds: float) -> Iterator[Measured]:
    """Each of ``rows`` that runs; none is started after so many ``seconds``."""
    import torch

    begun = time.monotonic()
    for number, row in enumerate(rows):
        if time.monotonic() - begun > seconds:
            print(f"out of time after {number} configurations")
            return
        try:
            yield measured(row, steps)
        except (SpecError, RuntimeError) as error:
            print(f"{name_of(row):66} {str(error).splitlines()[0][:120]}", flush=True)
        finally:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.compiler.reset()


def chosen(text: str | None, rows: Sequence[Any]) -> list[Any]:
    """Those that ``text`` names by their numbers from 0 on, such as 0-5,8; all without it."""
    if text is None:
        return list(rows)
    spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [rows[number] for span in spans for number in range(span[0], span[-1] + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=Path, default=CONFIGURATIONS, help="other rows, as YAML")
    parser.add_argument("--rows", help="only some, such as 0-5,8")
    parser.add_argument("--measured", type=Path, help="results of an earlier run: nothing is measured")
    parser.add_argument("--calibrated", help="cluster file of `shardwise calibrate`")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no configuration after so many")
    options = parser.parse_args()
    if options.measured is not None:
        content = json.loads(options.measured.read_text(encoding="utf-8"))
        found = iter(chosen(options.rows, [Measured(**one["measured"]) for one in content.pop("rows")]))
    else:
        import torch

        content = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        content["device"] = torch.cuda.get_device_name(0)
        text = options.configurations.read_text(encoding="utf-8")
        rows = chosen(options.rows, parse_yaml(text, str(options.configurations)))
        found = all_measured(rows, options.steps, options.seconds)
    results = []
    for step in found:
        results.append(compared(step, options.calibrated))
        print(line(results[-1]), flush=True)
    if results:
        show(results)
    if options.out is not None:
        options.out.write_text(json.dumps({**content, "rows": [asdict(one) for one in results]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

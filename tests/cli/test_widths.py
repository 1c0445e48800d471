"""What verbs print at 60 to 160 columns: no number is cut, no word stands upright, no line is too long."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cli.running import run
from report.whole import WIDTHS, check_lines, check_whole, drawn
from shardwise.report import console as printing
from shardwise.report.page import Page
from shardwise.report.progress import OneLine, fitted
from shardwise.report.tables import FittedTable
from shardwise.spec.clusters import cluster_from
from shardwise.spec.strategy import Strategy

ROOT = Path(__file__).parents[2]
DENSE = "--model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --dp 16 --zero 1 --global-batch 1024 --seq 8192"
VERBS = {
    "analyze": f"analyze {DENSE} --details --scaling --memory-over-time --tokens 15T --price 2.5/h --mtbf 50700h",
    "analyze, experts": "analyze --model deepseek-v3 --cluster hgx-h800:256 --pp 16 --ep 64 --zero 1 --seq 4096 "
    "--global-batch 15360 --schedule dualpipe --stage-layers balanced --recompute full",
    "plan": "plan --model llama3-8b --cluster dgx-h100:4 --seq 8192 --global-batch 1024 --tp 1 --cp 1 --pp 1..2 "
    "--out - --details --what-if memory=141GB --pareto memory --tokens 1T --price 2.5/h",
    "plan, several kinds": "plan --model llama3-8b --cluster dgx-h100:1+dgx-a100:1 --tp 8 --global-batch 64 --seq 2048 "
    "--out -",
    "explain allreduce": "explain allreduce --cluster dgx-h100:4",
    "explain zero": "explain zero --params 7.5e9 --dp 64",
    "explain flops": "explain flops --model gpt3-175b",
    "explain bubble": "explain bubble",
    "explain tp": "explain tp",
    "explain activations": "explain activations --model mixtral-8x7b",
    **{f"list {what}": f"list {what} --sources" for what in ("models", "devices", "links", "clusters", "stacks")},
    "list collectives": "list collectives",
    "lab": "lab",
    "validate bubbles": f"validate {ROOT}/validation/pipeline_bubble.csv",
    "validate collectives": f"validate {ROOT}/validation/collectives.csv",
}  # fmt: skip


class Recorded:
    """Everything that consoles were told to print, to be printed again at other widths."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.printed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        recorded = self.printed

        class Recording(Console):
            def print(self, *objects: Any, **settings: Any) -> None:
                recorded.append((objects, settings))

        monkeypatch.setattr(printing, "Console", Recording)

    def check(self) -> None:
        assert any(isinstance(one, FittedTable) for objects, _ in self.printed for one in objects)
        for width in WIDTHS:
            for objects, settings in self.printed:
                if settings.get("overflow") == "ignore" or settings.get("soft_wrap"):
                    continue  # a drawing; what a terminal folds by itself
                check_lines(drawn(*objects, width=width, **settings), width)
                for one in objects:
                    if isinstance(one, FittedTable):
                        check_whole(one, width)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


@pytest.mark.quick(5)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_at_every_width(verb: str, recorded: Recorded) -> None:
    result = run(*VERBS[verb].split())
    assert result.status in (0, 1), result.err  # 1: it does not fit, and the tables say so
    recorded.check()
    if verb == "plan":  # its degrees were cut to one digit at 80 columns
        ranking = next(one for objects, _ in recorded.printed for one in objects if isinstance(one, FittedTable))
        assert re.search(r"\b32\b", drawn(ranking, width=80))


def test_scored_runs_at_every_width(tmp_path: Path, recorded: Recorded) -> None:
    rows = list(csv.reader((ROOT / "validation" / "training_runs.csv").open(encoding="utf-8")))
    few = tmp_path / "runs.csv"
    with few.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([rows[0], *rows[1::40]])
    assert run("validate", str(few)).status == 0
    recorded.check()


# -- reports of what has run, made by hand ---------------------------------------------------------------------


def _compared() -> None:
    from shardwise.report.compare import comparison_page

    part = SimpleNamespace(name="late ranks", predicted=0.0, measured=-1e-19, difference=-1e-19, hidden_predicted=None,
                           hidden_measured=0.01234)  # fmt: skip
    ranks = [
        SimpleNamespace(rank=one, parts={"compute": 0.1234}, waits=12.5e-6, layer_seconds=0.00123) for one in (0, 12)
    ]
    sent = {"dimensions": ("dp", "cp"), "collectives": 1234.0, "planned": 2**33, "recorded": 2**33 - 1,
            "unrecorded": ()}  # fmt: skip
    messages = {**sent, "unrecorded": ("pp activations", "cp keys and values")}
    found: Any = SimpleNamespace(
        measured=SimpleNamespace(busiest=ranks[1], ranks=ranks, numbers=(10, 11), step_seconds=1.234),
        predicted=SimpleNamespace(step_seconds=1.111),
        parts=(part, SimpleNamespace(**{**vars(part), "name": "compute", "measured": 1234.5, "difference": -0.0123})),
        memory=(SimpleNamespace(name="activations", predicted=2**40, measured=123456789),),
        sent=(SimpleNamespace(**sent), SimpleNamespace(**messages)),
        differences=(SimpleNamespace(**vars(part), cause="ranks 0 and 12 take 3.4 times as long as others do"),),
        usual_seconds=1.2, slowness={0: 1.0, 12: 1.34}, slow_rank=None, slow_link=None, mismatch=None,
        missing_steps="",
    )  # fmt: skip
    comparison_page(found, None).print()


def _calibrated() -> None:
    from shardwise.report.measured import calibration_page

    cluster = cluster_from("dgx-h100:4")
    residual = SimpleNamespace(what="products of every size", figures=123, median_error=0.0123, worst_error=0.345)
    found: Any = SimpleNamespace(cluster=cluster, residuals=(residual,), far_off=())
    calibration_page(found, cluster, Path("cluster.yaml")).print()


def _recut() -> None:
    from shardwise.report.measured import recut_page

    strategy = SimpleNamespace(strategy=SimpleNamespace(order=("tp", "cp", "dp", "pp")))
    found: Any = SimpleNamespace(layers=((16, 16, 16), (18, 14, 16)), slowness=(1.0, 1.34, 1.0), job=strategy,
                                 old=strategy, step_seconds=1.2, expected_seconds=1.0, gain=1.2)  # fmt: skip
    recut_page(found, Path("runs/last/recut.yaml")).print()


def _measured() -> None:
    from shardwise.report.bench import measured_page

    one = SimpleNamespace(
        level="infiniband", kind="all_reduce", ranks=16, algorithm="hierarchical(ring,ring_pipelined)",
        size_bytes=2**27, median_seconds=0.00123, least_seconds=0.00111, algorithm_bandwidth=123e9,
        bus_bandwidth=234e9, predicted_seconds=0.001, right=True,
    )  # fmt: skip
    measured: Any = [one, SimpleNamespace(**{**vars(one), "algorithm": "backend", "predicted_seconds": None})]
    measured_page(measured).print()


def _inspected() -> None:
    from shardwise.report.status import contents_page

    tensor = {"kind": "weight", "name": "layers.11.attention.project_queries_keys_values.weight", "dtype": "bf16",
              "shape": (4096, 12288), "pieces": 16, "bytes": 100_663_296}  # fmt: skip
    found: dict[str, Any] = {
        "path": "/data/runs/llama3-8b/checkpoints/step-00012000", "step": 12000, "model": "llama3-8b",
        "layout": {"tp": 8, "zero": 1}, "precision": "bf16",
        "numbers": {"optimizer_steps": 12000, "data": {"batch": 12000, "sequences": 1024}, "losses": [2.5]},
        "files": {"shard-00000": 2**33}, "tensors": [tensor], "bytes": {"weight": 100_663_296},
    }  # fmt: skip
    contents_page(found, each_tensor=True).print()


def _traced() -> None:
    from shardwise.report.measured import dry_run_page

    parts = ("weights", "gradients", "optimizer", "activations", "recomputed", "gathered", "communication", "temporary")
    sizes = dict.fromkeys(parts, 123_456_789)
    compared = SimpleNamespace(what="tp all_gather", unit="bytes", planned=2**36, traced=2**36 + 2**20,
                               difference=0.0001, defect=False, negligible=False)  # fmt: skip
    line = SimpleNamespace(what="layer: inputs, forward", peer=12, kind="send_recv", dimension="pp", ranks=128)
    found: Any = SimpleNamespace(
        job=SimpleNamespace(model=SimpleNamespace(name="llama3-70b"),
                            strategy=SimpleNamespace(order=("tp", "dp"), degree=lambda name: 8, world=4096)),
        coordinates={"tp": 3, "dp": 5}, rank=43, traced="2 of 80 layers and 2 of 64 microbatches", peak=sizes,
        planned_peak=sizes, peak_place="backward of layer 12", peak_bytes=2**36, planned_peak_bytes=2**36,
        holders=[SimpleNamespace(part="activations", operator="aten.mm.default", made_in="layers.0.mlp", number=12,
                                 bytes=2**28)],
        calls=[SimpleNamespace(line=line, count=1280, bytes=2**34)], compared=[compared], defects=[compared], fits=True,
    )  # fmt: skip
    dry_run_page(found).print()


def _verified() -> None:
    from shardwise.report.measured import verification_page

    job = SimpleNamespace(
        strategy=Strategy(tp=2, dp=4, zero=3),
        model=SimpleNamespace(name="tiny", layers=1, hidden=64), training=SimpleNamespace(precision="fp32"),
    )  # fmt: skip
    worst = SimpleNamespace(value=1.2e-7, where="layers.3.attention.project_queries_keys_values.weight of step 2")
    found: Any = SimpleNamespace(
        job=job, steps=1, tolerance=1e-5, ok=True, worst={"loss": worst, "gradient": worst}, in_fp8={}
    )
    asked: Any = job
    verification_page(asked, found).print()


def _trained() -> None:
    from shardwise.launch.run import RehearsalCheck
    from shardwise.report.status import points_page, summary_pieces
    from shardwise.run.metrics.lines import RunSummary

    Page.of(
        summary_pieces(
            RunSummary(1200, 10.9, 3.2, 3.4, 10.8, 3.3, 12.5, 11.9, 2**36, 2**35, 123456.0, 0.4, 0.1), "bf16"
        )
    ).print()
    points_page(
        [RehearsalCheck("memory does not grow", "+0.12% (at most 1%), between step 10 and step 1,200", True)]
    ).print()


REPORTS: dict[str, Callable[[], None]] = {
    "compare": _compared,
    "calibrate": _calibrated,
    "recut": _recut,
    "bench": _measured,
    "checkpoint": _inspected,
    "dryrun": _traced,
    "verify": _verified,
    "train": _trained,
}


@pytest.mark.parametrize("width", WIDTHS)
def test_findings_of_doctor_at_every_width(width: int) -> None:
    from shardwise.cli.doctor import print_finding
    from shardwise.measure.doctor.host import Checked

    found = Checked(
        "shared memory", "warn", "63.9 MiB free of 64.0 MiB in /dev/shm", "start the container with --shm-size 1g"
    )
    for soft_wrap in (False, True):
        out = io.StringIO()
        print_finding(Console(file=out, width=width, soft_wrap=soft_wrap, color_system=None), found)
        assert " ".join(out.getvalue().split()) == f"warn shared memory {found.figure}; {found.remedy}"
        assert len(out.getvalue().splitlines()) == 1 if soft_wrap else True
        check_lines(out.getvalue(), 200 if soft_wrap else width)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_line_of_a_run_always_has_the_step(width: int) -> None:
    """At 80 columns it hid the step."""
    words = ("loss 3.213", "4 min 22 s left", "held out 3.300", "123k tokens/s", "262 ms a step (predicted 250 ms)",
             "MFU 41.2%", "71.4 GiB")  # fmt: skip
    line = fitted("step 1,234 of 10,000", words, width)
    assert len(line) <= width
    assert line.startswith("step 1,234 of 10,000: loss 3.213, 4 min 22 s left")
    out = io.StringIO()
    with Console(file=out, width=width, force_terminal=True, color_system=None) as console:
        progress = OneLine(console=console)
        progress.add_task("", total=10_000, completed=1234, words=words)
        console.print(progress.get_renderable())
    check_lines(out.getvalue(), width)
    assert "step 1,234 of 10,000: loss 3.213, 4 min 22 s left" in out.getvalue()


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_of_what_has_run_at_every_width(report: str, recorded: Recorded) -> None:
    REPORTS[report]()
    recorded.check()

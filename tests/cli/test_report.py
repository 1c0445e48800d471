"""`shardwise report`: one file that opens from disk in a real browser, every picture with the figures of --json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page, require_browser
from cli.running import error_line, run, run_json
from measure.compare.slowed import profiled_job, run_profiled
from shardwise.report.charts.chart import readable
from shardwise.run.metrics.recorder import ENDED, STARTED, EventLog
from shardwise.spec.job import Job
from training.runs import write_shards

FILE = "examples/llama3-405b-16384-h100.yaml"
ROOT = Path(__file__).parents[2]
SEARCHED = {"pareto", "ranking"}
JOB_CHARTS = {
    *("mesh", "step", "timeline", "memory", "memory-over-time", "communication", "levels"),
    *("roofline", "scaling", "campaign", *SEARCHED),
}
RUN_CHARTS = {"loss", "throughput", "predicted-step", "comparison", "comparison-memory"}
# What Chart.js has of a canvas, and whether anything is on it.
DRAWN = """[...document.querySelectorAll('[data-chart]')].map(place => {
  const canvas = place.querySelector('canvas');
  if (!canvas) return [place.dataset.chart, place.querySelectorAll('.mesh-cell').length, -1];
  const points = Chart.getChart(canvas).data.datasets.reduce((sum, one) => sum + one.data.length, 0);
  const blank = document.createElement('canvas');
  blank.width = canvas.width;
  blank.height = canvas.height;
  return [place.dataset.chart, points, canvas.toDataURL().length - blank.toDataURL().length];
})"""

MIDDLE_OF_SECOND_BAR = """(() => {
  const canvas = document.querySelector('[data-chart=memory] canvas'), box = canvas.getBoundingClientRect();
  const bar = Chart.getChart(canvas).getDatasetMeta(0).data[1].getCenterPoint();
  return [box.x + bar.x, box.y + bar.y];
})()"""
TOO_LARGE = "--model llama3-70b --cluster dgx-h100:1 --tp 8 --global-batch 64 --seq 8192 --no-search"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    require_browser()
    with Browser() as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    found = browser.page()
    found.shape(1200)
    yield found
    assert found.problems == []
    assert [one for one in found.requests if not one.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3 405B on 16,384 H100, without the search, which takes a minute."""
    path = tmp_path_factory.mktemp("large") / "report.html"
    asked = ["--tokens", "15T", "--price", "2.5/h", "--mtbf", "50700h", "--no-search", "-o", str(path)]
    done = run("report", str(ROOT / FILE), *asked)
    assert done.status == 0, done.err
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes, profiled."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    shards = write_shards(folder.parent / "words")
    run_profiled(profiled_job(shards, 2, dp=2, zero=1), folder)
    return folder


def told_by(page: Page) -> Any:
    return page.evaluate("JSON.parse(document.getElementById('data').textContent)")


def require_drawn(page: Page, names: set[str]) -> None:
    found = {name: (points, inked) for name, points, inked in page.evaluate(DRAWN)}
    assert set(found) == names
    assert all(points > 0 and (inked == -1 or inked > 1000) for points, inked in found.values()), found
    # A table under every chart, with as many rows as its data.
    rows = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('figure')].map(one => "
        "[one.id, one.querySelectorAll('tbody tr').length]))"
    )
    charts = told_by(page)["charts"]
    assert rows == {f"chart-{name}": len(one["table"]["rows"]) for name, one in charts.items()}


def test_a_large_plan_opens_from_disk_with_the_figures_of_json(page: Page, large: Path) -> None:
    page.open(large.as_uri())
    require_drawn(page, JOB_CHARTS - SEARCHED)
    told, analysed = told_by(page), run_json("analyze", str(ROOT / FILE), "--scaling", "--tokens", "15T")
    verdict = told["verdict"]
    assert verdict["predicted_seconds"] == analysed["time"]["predicted_seconds"]
    assert verdict["low_seconds"] == analysed["time"]["predicted_seconds_low"]
    assert verdict["high_seconds"] == analysed["time"]["predicted_seconds_high"]
    assert verdict["memory_bytes"] == analysed["memory"]["total_bytes"]
    assert page.evaluate("document.querySelector('h1').textContent") == verdict["sentence"]
    # What Chart.js draws of the memory, rank by rank.
    drawn = page.evaluate("Chart.getChart(document.querySelector('[data-chart=memory] canvas')).data.datasets"
                          ".map(one => one.data)")  # fmt: skip
    totals = [sum(filter(None, column)) for column in zip(*drawn)]
    assert totals == pytest.approx([one["total_bytes"] for one in analysed["memory"]["by_pipeline_rank"]])
    efficiency = [row[5] for row in told["charts"]["scaling"]["table"]["rows"]]
    assert efficiency == [row["efficiency"] for kind in ("strong", "weak") for row in analysed["scaling"][kind]]
    # And what a reader sees in the table under it.
    shown = page.evaluate("[...document.querySelectorAll('#chart-step tbody tr')].map(row => row.cells[1].textContent)")
    assert shown[-1] == readable(analysed["time"]["predicted_seconds"], "seconds")


@pytest.mark.slow
def test_a_large_plan_opens_among_other_strategies(page: Page, tmp_path: Path) -> None:
    """What `plan` says of the same model, cluster and batch."""
    found = run_json("plan", str(ROOT / FILE), "--pareto", "memory", "--out", "-")
    done = run("report", str(ROOT / FILE), "--tokens", "15T", "-o", str(tmp_path / "report.html"))
    assert done.status == 0, done.err
    page.open((tmp_path / "report.html").as_uri())
    require_drawn(page, JOB_CHARTS)
    front = next(one for one in told_by(page)["charts"]["pareto"]["series"] if one["name"] == "front")
    expected = [[one["memory"]["total_bytes"], one["predicted_seconds"]] for one in found["pareto"]]
    assert front["points"] == expected


def test_a_run_opens_from_disk_beside_its_prediction(page: Page, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    done = run("report", str(trained), "-o", str(path))
    assert done.status == 0, done.err
    page.open(path.as_uri())
    # The loop that tests run writes no prediction of its own: the profiled steps have one.
    found = {name for name, *_ in page.evaluate(DRAWN)}
    require_drawn(page, found)
    assert found >= (RUN_CHARTS - {"predicted-step"}) | (JOB_CHARTS - {"campaign"})
    told = told_by(page)["charts"]
    compared = run_json("compare", str(trained))
    rows = {row[0]: row[1:3] for row in told["comparison"]["table"]["rows"]}
    assert rows["step"] == [compared["step_seconds"]["predicted"], compared["step_seconds"]["profiled"]]
    assert rows["compute"] == [compared["parts"]["compute"][name] for name in ("predicted", "measured")]
    losses = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    expected = [[one["step"], one["loss"]] for one in losses if one.get("loss") is not None]
    assert told["loss"]["series"][0]["points"] == expected and len(expected) > 3
    assert "7 steps" in page.evaluate("document.querySelector('.facts').textContent")


@pytest.mark.slow
def test_it_follows_the_reader(page: Page, large: Path, tmp_path: Path) -> None:
    """Dark, narrow, and on paper, which is white whatever the screen was."""
    page.open(large.as_uri())
    colours = "[getComputedStyle(document.body).backgroundColor, Chart.getChart(document.querySelector('canvas'))" \
              ".data.datasets[0].backgroundColor]"  # fmt: skip
    light = page.evaluate(colours)
    page.shape(390, 800, dark=True)
    page.wait_for(f"JSON.stringify({colours}) !== {json.dumps(json.dumps(light, separators=(',', ':')))}")
    dark = page.evaluate(colours)
    assert light[0] == "rgb(255, 255, 255)" and dark[0] != light[0] and dark[1] != light[1]
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # nothing to scroll sideways
    page.evaluate("addEventListener('beforeprint', () => { window.printed = [" + colours + "].flat(); })")
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert page.evaluate("window.printed") == light
    page.wait_for("!document.documentElement.hasAttribute('data-print')")
    assert page.evaluate(colours) == dark


def test_figures_in_the_browser_are_those_of_python(page: Page, large: Path) -> None:
    values = [0, 1, 2, 7, 999, 999.5, 1000, 1023, 1024, 0.1234, 1e-9, 3.3e-5, 0.0999, 59.96, 600, 3599, 86400.0, 2e5,
              4.2e7, 1.5e12, 7.7e15, -3.2, 12345.678]  # fmt: skip
    page.open(large.as_uri())
    for unit in ("bytes", "seconds", "share", "count", "FLOP/s", "B/s", "tokens/s", "loss", "number"):
        shown = page.evaluate(f"{json.dumps(values)}.map(one => ShardwiseCharts.readable(one, {json.dumps(unit)}))")
        assert shown == [readable(float(one), unit) for one in values], unit


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name",
    ["<script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>", '</script><script>window.hacked=1//"'],
)
def test_a_name_with_a_script_in_it_is_a_name(page: Page, tmp_path: Path, name: str) -> None:
    job = tmp_path / "job.yaml"
    made = Job.from_yaml((ROOT / "examples/llama3-70b-dgx-h100.yaml").read_text(encoding="utf-8"))
    told = {**made.to_dict(), "model": {**made.model.to_dict(), "name": name}}
    job.write_text(json.dumps(told), encoding="utf-8")
    path = tmp_path / "report.html"
    assert run("report", str(job), "--no-search", "-o", str(path)).status == 0
    page.open(path.as_uri())
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelector('h1').textContent").startswith(f"{name} on 512")
    assert name in page.evaluate("document.title")


def test_a_click_on_a_bar_is_told(page: Page, large: Path) -> None:
    """What opens the formula of a bar on a page."""
    page.open(large.as_uri())
    page.evaluate(
        "const place = document.querySelector('[data-chart=memory]'); window.picked = null;"
        "ShardwiseCharts.draw(place, report.charts.memory, (...picked) => { window.picked = picked; });"
        "place.scrollIntoView()"
    )
    x, y = page.evaluate(MIDDLE_OF_SECOND_BAR)
    for kind in ("mousePressed", "mouseReleased"):
        page.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1})
    assert page.wait_for("window.picked") == [0, 1]


# -- without a browser --------------------------------------------------------------------------------------------


def test_the_file_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    done = run("report", "--model", "llama3-8b", "--cluster", "dgx-h100:1", "--tp", "8", "--no-search", "-o", str(path))
    assert done.status == 0
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=[\"']?(?:\w+:|/)", text)
    assert "default-src 'none'" in text
    assert "MIT License" in text  # of the chart library
    licence = ROOT / "src/shardwise/report/assets/LICENSE.chart.js.md"
    assert "Chart.js Contributors" in licence.read_text(encoding="utf-8")


def test_a_job_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    done = run("report", *TOO_LARGE.split(), "-o", str(tmp_path / "report.html"))
    assert done.status == 1
    assert "does not fit (" in done.out and "What would fit" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_data_of_every_picture_is_printed(tmp_path: Path) -> None:
    told = run_json("report", "--model", "llama3-8b", "--cluster", "dgx-h100:1", "--tp", "2", "--no-search",
                    "-o", str(tmp_path / "report.html"))  # fmt: skip
    assert set(told["charts"]) == JOB_CHARTS - SEARCHED - {"campaign"}
    assert told["not_drawn"] == [
        "other strategies were not searched for (--no-search)",
        "no tokens of the whole run are given (--tokens 15T, --price 2.5/h)",
    ]


def test_a_comparison_in_pictures(trained: Path) -> None:
    shown = run("compare", str(trained), "--plot", columns=80)
    assert shown.status == 0 and max(map(len, shown.out.splitlines())) <= 80
    told = run_json("compare", str(trained))
    assert readable(told["parts"]["compute"]["predicted"], "seconds") in shown.out
    assert "█ predicted   ▒ measured" in shown.out


def test_a_run_that_was_not_profiled_says_so(trained: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "job.yaml").write_bytes((trained / "job.yaml").read_bytes())
    done = run("report", str(bare), "--no-search", "-o", str(tmp_path / "report.html"))
    assert done.status == 0
    assert "no step was profiled" in done.out and "metrics.jsonl has no step" in done.out


def test_a_run_that_failed_half_way_says_so(trained: Path, tmp_path: Path) -> None:
    """What it had recorded until then is drawn."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "job.yaml").write_bytes((trained / "job.yaml").read_bytes())
    lines = (trained / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (broken / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20], encoding="utf-8")  # killed in a line
    events = EventLog(broken / "events.jsonl")
    events.write(STARTED, 0)
    events.write(ENDED, 0, "rank 1 ran out of memory", status=1)
    told = run_json("report", str(broken), "--no-search", "-o", str(tmp_path / "report.html"))
    steps = Job.from_yaml((trained / "job.yaml").read_text(encoding="utf-8")).run.steps
    assert (told["run"]["state"], told["run"]["step"], told["run"]["why"]) == ("failed", 2, "rank 1 ran out of memory")
    assert len(told["charts"]["loss"]["series"][0]["points"]) == 2
    assert f"failed, step 2 of {steps}: rank 1 ran out of memory" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["missing.yaml"], "missing.yaml"),
        (["{folder}"], "is not a run's folder"),
        (["{folder}/last"], "is not a run's folder"),
        (["{run}", "--tp", "2"], "flags do not change a run that was trained; leave them out, or give its job.yaml"),
        (["--model", "llama3-8b", "-o", "{folder}"], "--out: {folder} cannot be written"),
        (["--model", "llama3-8b", "-o", "{folder}/none/report.html"], "cannot be written"),
        (
            ["--model", "llama3-8b", "--cluster", "dgx-h100:1", "--price", "2/h"],
            "--price: has no effect without --tokens",
        ),
        (["a\0b"], "a"),
        (["--model", "llama3-8b", "--time-limit", "soon"], "--time-limit: 'soon'"),
        (["--model", "llama3-8b", "--time-limit", "9s", "--no-search"], "--time-limit: '9s' and --no-search"),
    ],
)
def test_bad_input_is_one_line(trained: Path, tmp_path: Path, arguments: list[str], line: str) -> None:
    known = {"folder": str(tmp_path), "run": str(trained)}
    done = run("report", *(one.format(**known) for one in arguments))
    assert line.format(**known) in error_line(done)
    assert list(tmp_path.iterdir()) == []

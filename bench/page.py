"""How long the page of `shardwise ui` takes: an answer of its server, a changed control until it is painted in headless
Chromium, and what a first visit sends over the wire.

Exits with 1 where a median is beyond its target. `--pictures FOLDER` keeps what it looks like.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ANSWER_MS, REPAINT_MS, LOADED_BYTES = 100.0, 150.0, 300_000
JOBS: dict[str, dict[str, Any]] = {
    "llama3-70b on 64 H100": {"model": "llama3-70b", "cluster": "dgx-h100:8", "global_batch": 512, "seq": 8192, "tp": 8,
                              "pp": 2, "zero": 1},
    "llama3-405b on 16,384 H100": {"model": "llama3-405b", "cluster": "dgx-h100:2048", "global_batch": 2048,
                                   "seq": 8192, "tp": 8, "pp": 16, "stage_layers": "balanced", "zero": 1},
    "deepseek-v3 on 2,048 H100": {"model": "deepseek-v3", "cluster": "dgx-h100:256", "global_batch": 15360,
                                  "seq": 4096, "ep": 64, "pp": 16, "stage_layers": "balanced", "zero": 1},
}  # fmt: skip
# A job has another value each time, so that nothing is remembered of it.
BATCHES = range(1, 16)
# Chips of the first job, pressed in turn.
PRESSED = [("tp", 4), ("zero", 3), ("pp", 4), ("tp", 8), ("recompute", "full"), ("microbatch", 2), ("pp", 2), ("cp", 2)]


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """The port of `shardwise ui`, and its process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "shardwise", "ui", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+)/", process.stdout.readline())
        assert found is not None
        try:
            yield int(found[1]), process.pid
        finally:
            process.terminate()


def answer_ms(port: int, job: dict[str, Any]) -> float:
    """Milliseconds from the request to the last byte of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    start = time.perf_counter()
    connection.request("POST", "/api/answer", json.dumps(job), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    took = time.perf_counter() - start
    assert answer.status == 200, answer.status
    connection.close()
    return took * 1e3


def cpu_ms(process: int) -> float:
    """Milliseconds that a process has computed, which other load changes less than the time that passes."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def browser_module() -> Any:
    """The browser of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    spec = importlib.util.spec_from_file_location("browser", ROOT / "tests" / "browser.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answered(page: Any, more_than: int = 0) -> int:
    page.wait_for(f"Number(document.documentElement.dataset.answered ?? 0) > {more_than}")
    return int(page.evaluate("Number(document.documentElement.dataset.answered)"))


def repaints_ms(page: Any) -> list[float]:
    """From the press of each chip to two frames after everything but the timeline is drawn."""
    done = answered(page)
    for field, value in PRESSED * 2:
        chip = f"#field-{field} .chip[data-value='{value}']"
        if page.evaluate(f"document.querySelector({json.dumps(chip)}).getAttribute('aria-checked') === 'true'"):
            continue
        page.evaluate(f"document.querySelector({json.dumps(chip)}).click()")
        done = answered(page, done)
        time.sleep(0.4)  # what follows an answer is not a part of the next one
    measured = page.evaluate("performance.getEntriesByName('repaint').map(one => one.duration)")
    return [float(one) for one in measured[1:]]


def pictures(page: Any, folder: Path) -> None:
    """What fits the window, in both themes, and a phone."""
    for name, width, height, dark in (
        ("light", 1360, 860, False),
        ("dark", 1360, 860, True),
        ("phone", 390, 844, False),
    ):
        page.shape(width, height, dark=dark)
        page.evaluate("scrollTo(0, 0)")
        page.settle()
        (folder / f"ui-{name}.png").write_bytes(
            base64.b64decode(page.call("Page.captureScreenshot", {"format": "png"})["data"])
        )


def report(what: str, value: float, unit: str, target: float) -> bool:
    print(f"{what}: {value:,.0f} {unit}, target {target:,.0f}: {'ok' if value <= target else 'BEYOND'}")
    return value <= target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    wanted = parser.parse_args()
    good = []
    with server() as (port, process):
        for name, job in JOBS.items():
            first, before = answer_ms(port, job), cpu_ms(process)
            times = [answer_ms(port, {**job, "global_batch": job["global_batch"] * one}) for one in BATCHES]
            computed = (cpu_ms(process) - before) / len(times)
            words = f"answer, {name} ({computed:.0f} ms of CPU; first {first:.0f}, slowest {max(times):.0f})"
            good.append(report(words, statistics.median(times), "ms", ANSWER_MS))
        with browser_module().Browser() as browser:
            page = browser.page()
            page.shape(1360, 900)
            page.open(f"http://127.0.0.1:{port}/")
            answered(page)
            page.wait_for("document.querySelectorAll('#runs tbody tr').length > 3")
            good.append(report("first visit, over the wire", page.received_bytes, "bytes", LOADED_BYTES))
            if wanted.pictures is not None:
                pictures(page, wanted.pictures)
                page.shape(1360, 900)
            times = repaints_ms(page)
            words = f"changed control until painted, {len(times)} changes (slowest {max(times):.0f})"
            good.append(report(words, statistics.median(times), "ms", REPAINT_MS))
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())

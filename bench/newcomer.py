"""A newcomer's first quarter of an hour, walked with what the README says alone: a fresh clone, `make demo`, its report
in a browser, the answer to "which parallelism for a 70B on 64 H100, and why", and the page.

Prints what each step took, and exits with 1 beyond fifteen minutes. `--pictures FOLDER` keeps what the browser showed.
"""

from __future__ import annotations

import argparse
import base64
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from page import browser_module

ROOT = Path(__file__).resolve().parents[1]
ALLOWED_SECONDS = 900.0
QUESTION = "plan --model llama3-70b --cluster dgx-h100:8 --global-batch 512 --seq 8192"


class Walk:
    """What was done, and how long each step took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.total_seconds = 0.0

    def step(self, what: str, done: Callable[[], str]) -> None:
        start = time.perf_counter()
        found = done()
        took = time.perf_counter() - start
        self.total_seconds += took
        print(f"{took:7.1f} s  {what}: {found}", flush=True)

    def command(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return done.stdout


def said(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"nothing like {pattern!r} was printed")
    return found[0]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of `shardwise ui`."""
    command = [".venv/bin/shardwise", "ui", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield said(r"http://\S+", process.stdout.readline())
        finally:
            process.terminate()


def kept(page: Any, pictures: Path | None, name: str) -> None:
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        shown = page.call("Page.captureScreenshot", {"format": "png"})["data"]
        (pictures / f"newcomer-{name}.png").write_bytes(base64.b64decode(shown))
    if page.problems:
        raise SystemExit(f"the browser reports {page.problems}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    pictures = parser.parse_args().pictures
    with tempfile.TemporaryDirectory(prefix="newcomer-") as made, browser_module().Browser() as window:
        walk = Walk(Path(made) / "shardwise")
        page = window.page()
        page.shape(1360, 900)

        def report() -> str:
            page.open((walk.folder / "runs/demo/report.html").as_uri())
            charts = page.evaluate("document.querySelectorAll('[data-chart]').length")
            kept(page, pictures, "report")
            return f"{page.evaluate('document.title')}, {charts} charts"

        def page_of_controls() -> str:
            with served(walk.folder) as address:
                page.open(address)
                page.wait_for("Number(document.documentElement.dataset.answered ?? 0) > 0")
                kept(page, pictures, "ui")
                return str(page.evaluate("document.querySelector('h1').innerText")).replace("\n", " ")

        walk.folder.mkdir()
        walk.step("git clone", lambda: walk.command("git", "clone", "--quiet", str(ROOT), ".") or "done")
        walk.step("make demo", lambda: said("^learnt.*", walk.command("make", "demo")))
        walk.step("runs/demo/report.html in a browser", report)
        walk.step(
            f"shardwise {QUESTION}",
            lambda: said("^Why 1 wins.*", walk.command(".venv/bin/shardwise", *QUESTION.split())),
        )
        walk.step("shardwise ui", page_of_controls)
    print(f"{walk.total_seconds / 60:.1f} minutes of {ALLOWED_SECONDS / 60:.0f}")
    return 0 if walk.total_seconds <= ALLOWED_SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())

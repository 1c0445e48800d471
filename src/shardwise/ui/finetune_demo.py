"""The demo of fine-tuning on the page, in a process of its own (`ui/children.py`).

Its events: ``progress`` in words; of each lesson ``lesson`` (its title and command), ``loss`` (the chart so far) and
``sample`` (a held-out prompt, and the answer before and after); then ``result`` or ``refused``.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.api.fine_tuning import finetune
from shardwise.api.finetune_demo import PACKAGES, Lesson, lessons, write_files
from shardwise.launch.outcome import Outcome
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.run import Launch
from shardwise.report.charts.plan import loss_chart
from shardwise.run.metrics.lines import Follower
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import require_packages
from shardwise.ui.children import Children, Event, write_event, write_refusal
from shardwise.ui.given import document

_EVERY_SECONDS = 0.5  # between two pictures of the loss


def demo_request(given: Mapping[str, Any]) -> None:
    """Raises SpecError if the demo is asked for with anything, or cannot run here."""
    for name in given:
        raise SpecError(str(name), "is not an option of the demo, which has none", "send {}")
    require_packages("demo", *PACKAGES)


class Demos:
    """The demos of a server, each in a temporary folder that goes with it."""

    def __init__(self) -> None:
        self._children = Children("shardwise.ui.finetune_demo", ("demo", "demo"), most_at_once=1)

    async def events(self, body: bytes) -> AsyncGenerator[Event, None]:
        with OwnedFolder("demo") as folder:
            async for event in self._children.events(json.dumps({"folder": str(folder)}).encode()):
                yield event


def main() -> int:
    folder = Path(document(sys.stdin.buffer.read())["folder"])
    try:
        _say("writing a model with random weights")
        write_files(folder)
        for lesson in lessons(folder):
            _give(lesson, folder)
        write_event("result", {})
    except SpecError as error:
        write_refusal(error)
    return 0


def _give(lesson: Lesson, folder: Path) -> None:
    write_event("lesson", {"title": lesson.title, "command": f"shardwise {lesson.command}".replace(f"{folder}/", "")})
    result = finetune(lesson.model, lesson.data, on_progress=_say, supervised=_trained, **lesson.options)
    if result.sample is None:
        failure = result.training and result.training.failure
        raise SpecError(
            "demo", f"{lesson.title}: {failure or 'was stopped'}", "see the server's terminal; start it again"
        )
    write_event("sample", asdict(result.sample))


def _say(words: str) -> None:
    write_event("progress", {"words": words})


def _trained(launch: Launch) -> Outcome:
    _say("training")
    with _pictured(launch.folder.metrics):
        return launch.supervised()


@contextmanager
def _pictured(metrics: Path) -> Iterator[None]:
    """Tells of the loss while its context is open."""
    follower, done = Follower.of_all(metrics), threading.Event()
    records: list[dict[str, Any]] = []

    def tell() -> None:
        records.extend(follower.new())
        chart = loss_chart(records)
        if chart is not None:
            write_event("loss", chart.to_dict())

    def follow() -> None:
        while not done.wait(_EVERY_SECONDS):
            tell()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        tell()


if __name__ == "__main__":
    raise SystemExit(main())

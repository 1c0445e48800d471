"""For managers that start one process per node (Kubeflow, SkyPilot): it starts the same command once per rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shardwise.launch.local import FIRST_ATTEMPT, supervise
from shardwise.launch.owned import OwnedFolder
from shardwise.launch.ranks import Gang
from shardwise.run.attempt import rank_file
from shardwise.run.environment import StartedNode
from shardwise.spec.run import Timeouts
from shardwise.spec.units import parse

VERBS = ("train", "verify", "calibrate", "bench", "doctor")  # commands that run ranks
_GRACE_SECONDS = 30.0
_DAYS = 30 * 86_400.0
UNWATCHED = Timeouts(start=_DAYS, step=_DAYS, checkpoint=_DAYS)  # for commands that report no progress


def run_on_node(node: StartedNode, arguments: Sequence[str]) -> int:
    """Runs `shardwise ARGUMENTS` as this node's ranks; returns its exit status. Restarts are the cluster manager's."""
    # A rank for every GPU, or one.
    here = node.ranks_here or max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))
    gang = Gang(here * node.nodes, range(here * node.node, here * (node.node + 1)), node.address, node.port)
    with OwnedFolder("node") as folder, printed_as_it_grows(rank_file(folder / FIRST_ATTEMPT, gang.ranks[0], "log")):
        outcome = supervise(
            [sys.executable, "-m", "shardwise", *arguments], gang.world, folder, gang=gang, timeouts=UNWATCHED,
            restarts=0, grace_seconds=_grace_seconds(arguments), on_event=partial(print, file=sys.stderr),
        )  # fmt: skip
    return outcome.status


def _grace_seconds(arguments: Sequence[str]) -> float:
    after = dict(zip(arguments, [*arguments[1:], ""]))
    given = next(
        (argument.partition("=")[2] for argument in arguments if argument.startswith("--grace=")), after.get("--grace")
    )
    return _GRACE_SECONDS if given is None else float(parse(given, "seconds", "⟨grace⟩"))


# -- A file that grows, copied to standard output as it does ---------------------------------------


POLL_SECONDS = 0.3


class Tail:
    """`new` returns the text appended since the last call; "" if there is no file yet."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> str:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                appended = file.read()
        except OSError:
            return ""
        self._at += len(appended)
        return appended.decode("utf-8", "replace")


@contextmanager
def printed_as_it_grows(path: Path) -> Iterator[None]:
    tail, done = Tail(path), threading.Event()

    def follow() -> None:
        while not done.wait(POLL_SECONDS):
            _print(tail.new())

    thread = threading.Thread(target=follow, name="tail", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _print(tail.new())


def _print(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()

"""Whether all nodes see one folder: each writes a file there, and looks for those of the others."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.layout.ranks import node_of
from shardwise.measure.calibrate.ranks import Rank, StoreBarrier
from shardwise.measure.doctor.facts import file_system_of
from shardwise.measure.doctor.host import Checked, Status

SEEN_SECONDS = 10.0  # NFS remembers for some seconds what a folder holds (nfs(5): acdirmin is 30 s, unless it is read)
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class SeenFiles:
    """What one node sees: whose files, of which file system; or why it cannot write there."""

    nodes: frozenset[int]
    file_system: str
    problem: str = ""


def seen_files(rank: Rank, folder: Path) -> SeenFiles | None:
    """By the first rank of every node; others have nothing to say."""
    if rank.number == 0:
        rank.store.set("token", secrets.token_hex(8))
    if not rank.first_of_host:
        return None
    nodes, token = rank.world // rank.ranks_per_host, rank.store.get("token").decode()
    own, barrier = node_of(rank.number, rank.ranks_per_host), StoreBarrier(rank.store, nodes)
    path, problem = _file(folder, token, own), ""
    try:
        path.write_text(token, encoding="utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        barrier.wait()
        seen = _seen(folder, token, nodes)
        barrier.wait()  # nobody removes a file that another looks for
    finally:
        path.unlink(missing_ok=True)
    return SeenFiles(seen, file_system_of(folder) if folder.is_dir() else "missing", problem)


def _file(folder: Path, token: str, node: int) -> Path:
    return folder / f".shardwise-doctor-{token}-{node}"


def _seen(folder: Path, token: str, nodes: int) -> frozenset[int]:
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            names = set(os.listdir(folder))  # noqa: PTH208 (reading the folder is what refreshes it)
        except OSError:
            names = set()
        seen = frozenset(node for node in range(nodes) if _file(folder, token, node).name in names)
        if len(seen) == nodes or time.monotonic() > deadline:
            return seen
        time.sleep(_LOOK_SECONDS)


def shared_finding(seen: Sequence[SeenFiles], hosts: Sequence[str], folder: Path, *, is_run: bool) -> Checked:
    """``found`` by node; ``is_run``: a run will be there, which needs a folder that all share."""
    bad: Status = "fail" if is_run else "warn"
    cannot = [f"{host} cannot write there ({own.problem})" for host, own in zip(hosts, seen) if own.problem]
    if cannot:
        return Checked("shared folder", "fail", f"{folder}: {'; '.join(cannot)}", "mount it for writing")
    every = frozenset(range(len(hosts)))
    if all(own.nodes == every for own in seen):
        figure = f"{folder} ({seen[0].file_system}): every host sees the files of all {len(hosts)}"
        return Checked("shared folder", "pass", figure)
    remedy = "put it on storage that all hosts share"
    together = max((own.nodes for own in seen), key=len)
    odd = [host for host, own in zip(hosts, seen) if own.nodes != together]
    if len(together) == 1:
        return Checked("shared folder", bad, f"{folder} is another folder on every host", remedy)
    what = f"{', '.join(odd)} {'has' if len(odd) == 1 else 'have'} another {folder} than the {len(together)} others"
    return Checked("shared folder", bad, what, remedy)

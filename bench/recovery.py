"""How fast a run is back: its state from the memory of another node, and from a store of 100 MB/s.

    PYTHONPATH=src python bench/recovery.py --gib 1

One process saves a model's weights and moments into two keepers and to a store whose answers are held back to that
rate, nothing of it cached; the first keeper is killed, as with its node; then both are restored as by a restarted run,
checksums included. Exits 1 where memory is less than five times as fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from checkpoint import job, timed
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.launch.keepers import Keepers, place_here
from shardwise.run.checkpoint.folder import CheckpointFolder, checkpoint_folder
from shardwise.run.storage.stores import Blocks, Limit, ObjectFacts, register_store
from shardwise.training.checkpoint.save import MemoryCopies, Saver, memory_folder
from shardwise.training.checkpointing import load_newest

LEAST_RATIO = 5.0
STORE_BYTES_PER_SECOND = 100e6
NUMBERS = {"data": {"batch": 1, "left_out": [], "sequences": 1}, "losses": []}


class ShapedStore:
    """Files of a folder, read at one rate by all threads together; writing is free."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock, self._free_at = folder, threading.Lock(), 0.0

    def within(self, limit: Limit) -> ShapedStore:
        return self  # a folder answers, slowly

    def _path(self, uri: str) -> Path:
        return self.folder / uri.partition("://")[2]

    def put(self, uri: str, content: bytes) -> None:
        self.upload(uri, lambda: iter([memoryview(content)]))

    def upload(self, uri: str, content: Blocks) -> None:
        self._path(uri).parent.mkdir(parents=True, exist_ok=True)
        with self._path(uri).open("wb") as file:
            for block in content():
                file.write(block)

    def read(self, uri: str, first: int = 0, last: int | None = None) -> bytes:
        with self._path(uri).open("rb") as file:
            file.seek(first)
            found = file.read() if last is None else file.read(last - first)
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + len(found) / STORE_BYTES_PER_SECOND
            wait_seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_seconds))
        return found

    def facts(self, uri: str) -> ObjectFacts:
        found = self._path(uri).stat()
        return ObjectFacts(found.st_size, found.st_mtime_ns)

    def listed(self, uri: str) -> dict[str, ObjectFacts]:
        root = self._path(uri)
        files = [path for path in root.rglob("*") if path.is_file()]
        return {str(path.relative_to(root)): ObjectFacts(path.stat().st_size) for path in files}

    def delete(self, uris: Iterable[str]) -> None:
        for uri in uris:
            self._path(uri).unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default 1)")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as name,
        process_group(0, 1, f"{name}/meeting"),
        closing(Keepers(Path(name) / "keepers.json")) as keepers,
    ):
        keepers.use([place_here(None, node) for node in range(2)])
        return measured(Engine(job(asked.gib)), keepers, Path(name), asked.gib)


def measured(engine: Engine, keepers: Keepers, folder: Path, gib: float) -> int:
    register_store("shaped", ShapedStore(folder / "store"))
    memory, store = memory_folder(keepers.file, 0), checkpoint_folder("shaped://store/run")
    copies, saver = MemoryCopies(engine, memory, 1, 600), Saver(engine, store)
    copies.save(1, NUMBERS)  # allocates its buffers
    copied = timed(copies.finish)
    copies.save(2, NUMBERS)
    copies.finish()
    saver.save(2, NUMBERS, wait=True)
    saver.finish()
    keepers.kept["node 0"].process.kill()
    began = time.process_time()
    seconds = {"memory": restored(engine, memory)}
    processor_seconds = time.process_time() - began
    seconds["store"] = restored(engine, store)
    ratio = seconds["store"] / seconds["memory"]
    verdict = "ok" if ratio >= LEAST_RATIO else "MISSED"
    print(f"a copy of {gib:g} GiB stops training for {copies.stall_seconds:.3f} s, and is whole {copied:.2f} s later")
    print(
        f"restored from the other node's memory in {seconds['memory']:.2f} s ({processor_seconds:.2f} s of "
        f"a processor; this machine has {os.cpu_count()}, and a load of {os.getloadavg()[0]:.1f}), from a store of "
        f"{STORE_BYTES_PER_SECOND / 1e6:g} MB/s in {seconds['store']:.2f} s: {ratio:.1f} times as fast "
        f"(at least {LEAST_RATIO:g}): {verdict}"
    )
    return 0 if verdict == "ok" else 1


def restored(engine: Engine, folder: CheckpointFolder) -> float:
    def work() -> None:
        assert load_newest(engine, folder) is not None

    return timed(work)


if __name__ == "__main__":
    sys.exit(main())

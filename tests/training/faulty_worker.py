"""A rank of a run that goes wrong where a test says: `python -m train.faulty_worker RUN_FOLDER`, with FAULTS set.

It is `shardwise.training.worker` with some of its calls wrapped from outside; the product knows nothing of faults.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VARIABLE = "FAULTS"


@dataclass(frozen=True)
class Fault:
    """Rank ``rank`` does ``what`` at the point ``at`` of ``step``, in one attempt (or all of them: None).

    ``at``: ``begin`` or ``backward`` of a step (its gradients are there, no weight has moved); ``writing`` (half of a
    shard is on disk), ``written`` (all of it, nobody knows), ``sealed`` (the manifest too, before the rename),
    ``committed`` of the checkpoint after that many steps.
    ``what``: ``kill``, ``stop``, ``raise``, ``nan``, ``differ`` (calls another collective), ``skip`` (leaves out its
    next all-reduce), ``second`` (starts the run once more), ``slow`` (waits in every layer from now on), ``limit`` (can
    write no large file any more), ``fill PATH``
    (takes what is left of a disk), ``free``, ``move WHAT`` (the run's folder: see `move`).
    """

    what: str
    at: str
    step: int
    rank: int
    attempt: int | None = 1


def spelled(*faults: Fault) -> str:
    return json.dumps([asdict(one) for one in faults])


class Faults:
    def __init__(self) -> None:
        attempt = int(Path(os.environ["SHARDWISE_ATTEMPT_FOLDER"]).name.rpartition("-")[2])
        told = [Fault(**one) for one in json.loads(os.environ.get(VARIABLE, "[]"))]
        self.mine = [one for one in told if one.rank == int(os.environ["RANK"]) and one.attempt in (attempt, None)]

    def reached(self, at: str, step: int, trainer: Any = None) -> None:
        for one in [one for one in self.mine if (one.at, one.step) == (at, step)]:
            self.mine.remove(one)  # a run that goes back comes by again
            _do(one.what, trainer)


def _do(what: str, trainer: Any) -> None:
    import torch
    import torch.distributed as dist

    word, _, path = what.partition(" ")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "raise":
        raise ArithmeticError("the moon is full")
    elif word == "nan":
        next(one.gradient for one in trainer.parameters if one.gradient is not None).view(-1)[0] = float("nan")
    elif word == "differ":
        dist.broadcast(torch.zeros(3), 0)
    elif word == "skip":
        _skip_one_reduction()
    elif word == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif word == "slow":
        _slow_down()
    elif word == "second":
        _start_second_run()
    elif word == "move":
        move(Path(sys.argv[1]), path)
    elif word == "fill":
        fill(Path(path))
    else:
        assert word == "free"
        Path(path).unlink()


def _skip_one_reduction() -> None:
    import torch.distributed as dist

    all_reduce = dist.all_reduce

    def skipped(*_: Any, **named: Any) -> Any:
        dist.all_reduce = all_reduce
        return SimpleNamespace(wait=lambda: True) if named.get("async_op") else None

    dist.all_reduce = skipped


def _slow_down() -> None:
    """This rank needs many times as long for a layer as others do."""
    import torch

    from shardwise.models.layer import Layer

    def wait(hidden: Any) -> Any:
        time.sleep(0.05)
        return hidden.clone()

    # An operator of its own, which a compiler leaves as it is.
    slow: Any = torch.library.custom_op("faults::wait", wait, mutates_args=(), schema="(Tensor hidden) -> Tensor")
    slow.register_fake(torch.empty_like)
    slow.register_autograd(lambda _, gradient: gradient)
    inner: Any = Layer.forward
    Layer.forward = lambda layer, hidden, *more: inner(layer, slow(hidden), *more)  # type: ignore[method-assign]


def _start_second_run() -> None:
    """What somebody sees who starts the same run once more; into the log of this rank."""
    command = [sys.executable, "-m", "shardwise", "train", f"{sys.argv[1]}/job.yaml", "--run-folder", sys.argv[1]]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"exit {found.returncode}: {found.stderr}", flush=True)


def move(run: Path, what: str) -> None:
    """To ``elsewhere``: the folder, which may be ``removed`` or ``replaced``, or that of the ``checkpoints`` alone."""
    elsewhere = run.with_name("elsewhere")
    (run / "checkpoints" if what == "checkpoints" else run).rename(elsewhere)
    if what == "removed":
        shutil.rmtree(elsewhere)
    if what in ("removed", "replaced"):
        run.mkdir()


def fill(path: Path) -> None:
    """Takes all that is left of a disk, to the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def step_of(part: Path) -> int:
    found = re.match(r"step-(\d+)", part.name)
    assert found
    return int(found[1])


def wrap(faults: Faults) -> None:
    from shardwise.engine.engine import Engine
    from shardwise.run.attempt import Reporter
    from shardwise.run.checkpoint.folder import CheckpointFolder
    from shardwise.training.checkpoint import save, shards

    now = {"step": 0}
    around(Reporter, "phase", before=lambda self, name, step, *_: _begins(faults, now, name, step))
    around(Engine, "forward_backward", after=lambda self, *_: faults.reached("backward", now["step"], self))
    around(save, "write_shard", after=lambda path, *_: faults.reached("written", step_of(path.parent)))
    around(shards, "write_block", before=lambda file, block: _half(faults, file, block))
    around(CheckpointFolder, "_sealed", after=lambda self, step, *_: faults.reached("sealed", step))
    around(CheckpointFolder, "commit", after=lambda self, step, *_: faults.reached("committed", step))


def around(
    owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Calls something with the same arguments, before or after a function that is there."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before:
            before(*arguments)
        found = inner(*arguments, **named)
        if after:
            after(*arguments)
        return found

    setattr(owner, name, wrapped)


def _begins(faults: Faults, now: dict[str, int], phase: str, step: int) -> None:
    now["step"] = step
    if phase == "step":
        faults.reached("begin", step)


def _half(faults: Faults, file: int, block: Any) -> None:
    """The header is there, and a part of the tensors."""
    if any(one.at == "writing" for one in faults.mine):
        path = Path(f"/proc/self/fd/{file}").readlink()
        path.write_bytes(bytes(block[: len(block) // 2]))
        faults.reached("writing", step_of(path.parent))


if __name__ == "__main__":
    from shardwise.training import worker

    wrap(Faults())
    os._exit(worker.main(sys.argv[1:], worker.train))

"""Whole training steps of small models on a GPU, as our engine runs them: what kernels measured alone do not show.

As a program, with the index of a device and numbers of cases, it compiles the kernels of these cases.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import PrecisionName, Training
from shardwise.training.loop import Timestamp

_logger = logging.getLogger("shardwise.measure")
_WARM, _STEPS = 5, 7
_WARM_SECONDS = 0.6  # the clocks settle, on a card that is hot already


@dataclass(frozen=True)
class StepCase:
    """A step of ``sequences`` with ``seq`` tokens each, and how it is run."""

    model: Model
    sequences: int
    seq: int
    precision: PrecisionName = "bf16"
    compile: bool = False
    graphs: bool = True
    microbatches: int = 1


@dataclass(frozen=True)
class CaseSample:
    """Seconds of the whole step, and of the update alone."""

    case: StepCase
    step_seconds: float
    update_seconds: float


_LLAMA = Model(name="calibration", layers=3, hidden=2048, heads=16, kv_heads=4, ffn=7168, vocab=32768, max_seq=8192,
               activation="swiglu", norm="rmsnorm")  # fmt: skip
_WIDE = replace(_LLAMA, layers=2, hidden=4096, heads=32, kv_heads=8, ffn=12288, vocab=65536)
_NORMED = replace(_LLAMA, layers=4, hidden=1024, heads=16, kv_heads=8, head_dim=128, ffn=2560, qk_norm=True)
_GPT = Model(name="calibration", layers=4, hidden=1280, heads=20, ffn=5120, vocab=32768, max_seq=1024,
             positions="learned", qkv_bias=True, attention_out_bias=True, mlp_bias=True)  # fmt: skip
_FINE = replace(_LLAMA, layers=2, ffn=2048, moe=MixtureOfExperts(experts=64, top_k=6, ffn=1024))
_COARSE_EXPERTS = MixtureOfExperts(experts=8, top_k=2, ffn=8192)
_COARSE = replace(_LLAMA, layers=1, hidden=3072, heads=24, kv_heads=8, moe=_COARSE_EXPERTS)
# The host launches the kernels of these more slowly than the device runs them.
_SMALL = replace(_LLAMA, layers=8, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=1024)
_TINY = (
    replace(_SMALL, layers=2),
    _SMALL,
    replace(_GPT, layers=8, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn=1024, vocab=1024),
    replace(_SMALL, layers=4, moe=MixtureOfExperts(experts=8, top_k=2, ffn=256)),
)

_EAGER = (
    StepCase(_LLAMA, 4, 4096),
    StepCase(_WIDE, 2, 8192),
    StepCase(_NORMED, 8, 2048),
    StepCase(_GPT, 16, 1024),
    StepCase(_NORMED, 2, 1024),  # small kernels
    StepCase(_GPT, 2, 1024),
    StepCase(replace(_LLAMA, layers=6, vocab=8192), 4, 1024, microbatches=4),
)
_COMPILED = tuple(replace(_EAGER[number], compile=True) for number in (0, 2, 3, 4, 5))
_FP8: tuple[PrecisionName, ...] = ("fp8", "fp8-rowwise", "fp8-blockwise")
CASES = (
    *_EAGER,
    StepCase(_FINE, 2, 4096),
    StepCase(_FINE, 1, 2048),
    StepCase(_COARSE, 2, 4096),
    *(StepCase(model, 1, 128, graphs=False) for model in _TINY),
    *_COMPILED,
    StepCase(_FINE, 2, 4096, compile=True),
    *(StepCase(_WIDE, 2, 4096, name, compile=True) for name in _FP8),
    *(StepCase(model, 1, 128, compile=True, graphs=False) for model in _TINY[1:3]),
)


def case_job(case: StepCase, device: Device) -> Job:
    """The job of one step, as it is measured and as it is priced."""
    cluster: Cluster = replace(cluster_from("laptop:1"), device=device)
    recorded = case.graphs and not (case.compile and case.model.moe)  # what `auto` decides, but without its warning
    training = Training(
        global_batch=case.sequences, seq=case.seq, precision=case.precision, compile=case.compile,
        graphs="auto" if recorded else False,
    )  # fmt: skip
    strategy = Strategy(dp=1, microbatch=case.sequences // case.microbatches)
    return Job(model=case.model, cluster=cluster, strategy=strategy, training=training)


def measured_cases(
    cases: Sequence[StepCase], base: Device, device: torch.device, report: Callable[[str], None]
) -> Iterator[CaseSample]:
    """In a process group of one process."""
    with process_group(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        for number, case in enumerate(cases):
            report(f"steps, {number + 1} of {len(cases)}")
            try:
                yield _measured(case, base, device)
            except torch.OutOfMemoryError:
                _logger.warning(
                    "left out of the calibration, for lack of memory: step %d of %d", number + 1, len(cases)
                )
            gc.collect()
            torch.cuda.empty_cache()
            torch.compiler.reset()


def _measured(case: StepCase, base: Device, device: torch.device) -> CaseSample:
    engine = Engine(case_job(case, base), device=str(device))
    batch = _batch(case, device)
    began = time.perf_counter()
    for number in itertools.count():
        engine.step(batch)
        torch.cuda.synchronize(device)
        if number >= _WARM and time.perf_counter() - began > _WARM_SECONDS * case.graphs:
            break
    step = _median_seconds(lambda: engine.step(batch), device)
    engine.forward_backward(batch)
    update = _median_seconds(lambda: update_again(engine), device)
    return CaseSample(case, step, update)


def run_once(case: StepCase, device_index: int) -> None:
    """Runs a first step, which compiles its kernels."""
    device = torch.device("cuda", device_index)
    with process_group(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        engine = Engine(case_job(case, cluster_from("dgx-h100").device), device=str(device))
        engine.step(_batch(case, device))


def _batch(case: StepCase, device: torch.device) -> Batch:
    text = torch.randint(case.model.vocab, (case.sequences, case.seq + 1), device=device)
    return Batch.of(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    stamps = [Timestamp(device)]
    for _ in range(_STEPS):
        call()
        stamps.append(Timestamp(device))
    stamps[-1].wait()
    return statistics.median(later.seconds_since(earlier) for earlier, later in pairwise(stamps))


def update_again(engine: Engine) -> None:
    """Runs an update that can be repeated: the gradients that it frees are restored."""
    kept = [(held.parameter, held.parameter.grad) for held in engine.parameters]
    engine.update()
    for parameter, gradient in kept:
        parameter.grad = gradient


# -- compiling ahead: a layer takes the compiler ten seconds, on one core ----------------------------


_LONGEST_SECONDS = 120.0


class Compiling:
    """Compiles ``cases`` in parallel processes, into PyTorch's cache on disk; `wait` returns when all are done.

    A case whose process fails is compiled when it runs.
    """

    def __init__(self, cases: Sequence[StepCase], device_index: int) -> None:
        numbers = [str(CASES.index(case)) for case in cases if case.compile]
        most = max(1, (os.cpu_count() or 1) * 3 // 4)
        quiet = subprocess.DEVNULL
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._processes = [
            subprocess.Popen([sys.executable, "-m", __name__, str(device_index), *some], stdout=quiet, stderr=quiet,
                             env=environment)
            for some in (numbers[first::most] for first in range(min(most, len(numbers))))
        ]  # fmt: skip

    def wait(self) -> None:
        for process in self._processes:
            try:
                process.wait(_LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    for number in sys.argv[2:]:
        run_once(CASES[int(number)], int(sys.argv[1]))

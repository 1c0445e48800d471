"""Compiles the steps of a calibration in processes of their own, at once: PyTorch keeps what was compiled on disk.

One layer takes the compiler ten seconds, on one core. As a program it runs the cases that its arguments number.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from shardwise.measure.calibrate.steps import CASES, StepCase, run_once

_LONGEST_SECONDS = 120.0


class Compiling:
    """Started at once; `wait` ends when all are done. One that fails leaves its case to be compiled where it runs."""

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

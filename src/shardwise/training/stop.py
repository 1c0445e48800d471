"""A process that is asked to end notes it, and ends at the next step that all ranks agree on."""

from __future__ import annotations

import signal
from typing import Any


class StopSignal:
    """``asked`` becomes true with SIGTERM, once `listen` was called."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        signal.signal(signal.SIGTERM, self._note)
        # Ctrl-C goes to all processes of a terminal; whoever started this one says what follows.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _note(self, *_: Any) -> None:
        self.asked = True

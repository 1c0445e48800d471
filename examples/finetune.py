"""`shardwise finetune`, shown on a CPU in two minutes: `python examples/finetune.py`.

A tiny model with random weights learns to chat (all weights are trained), then an adapter over it learns a habit that
is planted in its data: every answer ends with the same words. The sample at the end shows both.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from shardwise.api.finetune_demo import Lesson, lessons, write_files
from shardwise.cli.main import main

FOLDER = Path("runs/finetune-demo")


def shown(lesson: Lesson) -> int:
    print(f"\n\033[1m── {lesson.title}\033[0m\n$ shardwise {lesson.command}\n", flush=True)
    return main(lesson.command.split())


def run() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_files(FOLDER)
    chat, habit = lessons(FOLDER)
    return shown(chat) or shown(habit)


if __name__ == "__main__":
    sys.exit(run())

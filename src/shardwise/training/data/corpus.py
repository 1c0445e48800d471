"""Text that is on every machine: the sources of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def standard_library() -> list[Path]:
    """Its Python files in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "idlelib"}
    files = [path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())

"""Packages that not every installation has: what needs them says so before anything starts, with the line to install.

Nothing is imported to find out.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from shardwise.spec.errors import SpecError

TRAINING = ("torch", "safetensors")
TESTED_TORCH = ((2, 11), (2, 13))  # the first and the last, as pyproject.toml has them
_EXTRAS = {"torch": "train", "safetensors": "train", "pyarrow": "data", "tokenizers": "data"}
_TITLES = {"torch": "PyTorch"}


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that is imported and has no specification
        return False


def require_packages(what: str, *names: str) -> None:
    """Raises SpecError for the first package that ``what`` needs and that is not installed."""
    for name in names:
        if not is_installed(name):
            wanted = f"'shardwise[{_EXTRAS[name]}]'" if name in _EXTRAS else name
            title = _TITLES.get(name, f"the package {name}")
            raise SpecError(what, f"needs {title}, which is not installed", f"pip install {wanted}")


def torch_notes() -> list[str]:
    """A line where PyTorch is older or newer than what is tested."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    found = re.match(r"(\d+)\.(\d+)", version)
    first, last = TESTED_TORCH
    if found is None or first <= (int(found[1]), int(found[2])) <= last:
        return []
    tested = " to ".join(f"{major}.{minor}" for major, minor in TESTED_TORCH)
    return [f"PyTorch {version} is not tested here, {tested} are: pip install 'shardwise[train]'"]

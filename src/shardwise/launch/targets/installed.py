"""What must be the same on all hosts of a run: versions, and hashes of the code and of the job file."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

import shardwise
from shardwise.spec.errors import SpecError

PACKAGES = ("torch", "numpy", "safetensors")


def installed(working_folder: Path, job_file: Path | None = None) -> dict[str, str]:
    """Versions and hashes by name, in the order in which differences are reported; "missing" for what is not there."""
    versions = {"Python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    versions |= {
        "shardwise": shardwise.__version__,
        "the code of shardwise": code_hash(Path(shardwise.__file__).parent),
    }
    versions["the working folder"] = str(working_folder) if working_folder.is_dir() else "missing"
    if job_file is not None:
        versions["the job file"] = _hash(job_file)
    return versions


def require_same(here: Mapping[str, str], there: Mapping[str, str], host: str, folder: Path | None = None) -> None:
    """Raises SpecError for the first difference between this host and another."""
    for name, value in here.items():
        other = there.get(name, "missing")
        if other == value:
            continue
        if name == "the job file" and other == "missing":
            remedy = "the run's folder must be on storage that all hosts share (⟨run_folder⟩)"
            raise SpecError(host, f"does not see {folder}", remedy)
        raise SpecError(host, f"{name} is {other} there, {value} here", "make it the same on all hosts")


def code_hash(folder: Path) -> str:
    """A hash of all Python files; compiled ones do not count."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()} {_hash(path)}\n".encode())
    return digest.hexdigest()[:12]


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return "missing"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"

"""The Dockerfile: pinned, not root, clean; and the image that it builds is the one that manifests name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from required import require
from shardwise import __version__
from shardwise.launch.targets.manifest import DATA, IMAGE, RUNS, USER_ID

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# What a careless edit could make of it, and hadolint's rule against it.
SPOILT = {
    "DL3007": ("python:3.11.14-slim-bookworm", "python:latest"),
    "DL3006": ("python:3.11.14-slim-bookworm", "python"),
    "DL3008": ("gcc=4:12.2.*", "gcc"),
    "DL3009": (" \\\n    && rm -rf /var/lib/apt/lists/*", ""),
    "DL3042": ("--no-cache-dir ", ""),
    "DL3013": ('--constraint constraints.txt ".[train,data,remote]"', "torch"),
    "DL3002": ("USER ${RUN_AS}", "USER root"),
    "DL3025": ('CMD ["shardwise", "--help"]', "CMD shardwise --help"),
}


def hadolint(text: str) -> list[str]:
    """The rules that a Dockerfile breaks."""
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    require("hadolint", None if program else "no hadolint here (make installs it)")
    assert program is not None
    done = subprocess.run([program, "--no-color", "-"], input=text, capture_output=True, text=True, timeout=60)
    return re.findall(r"\b(?:DL|SC)\d{4}\b", done.stdout)


def test_it_is_clean() -> None:
    assert hadolint(TEXT) == []


@pytest.mark.parametrize("rule", SPOILT)
def test_a_careless_edit_is_found(rule: str) -> None:
    good, bad = SPOILT[rule]
    assert TEXT.count(good) == 1
    assert rule in hadolint(TEXT.replace(good, bad))


def test_it_is_the_image_of_the_manifests() -> None:
    assert f"shardwise:{__version__}" == IMAGE
    assert "from shardwise.launch.targets.manifest import IMAGE" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"ARG RUN_AS={USER_ID}\n" in TEXT and f"--uid {USER_ID} " in TEXT
    assert f"mkdir -p {RUNS} {DATA} " in TEXT


def test_what_it_installs_is_pinned_and_there() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    extras = re.search(r'"\.\[(.*)\]"', TEXT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras is not None
    for extra in extras[1].split(","):
        for wanted in project["optional-dependencies"][extra]:
            name = re.split(r"[<>=]", wanted)[0]
            assert re.search(rf"^{re.escape(name)}==", constraints, re.MULTILINE), name
    base = re.search(r"FROM python:(\d+\.\d+)\.\d+-", TEXT)
    assert base is not None and project["requires-python"] == f">={base[1]}"


def test_what_it_copies_reaches_the_builder() -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for name in line.split()]
    assert sorted(kept) == sorted(copied) and all((ROOT / name).exists() for name in copied)

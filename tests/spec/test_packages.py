"""Packages that are missing or not tested are told before anything starts, in one line with what to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.cli.arguments import require_torch
from shardwise.spec import installation
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import TESTED_TORCH, torch_notes

ROOT = Path(__file__).resolve().parents[2]
JOB = ["--model", "tiny", "--cluster", "laptop:1", "--global-batch", "1", "--seq", "32"]


@pytest.fixture
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    found = importlib.util.find_spec

    def find_spec(asked: str, package: str | None = None) -> Any:
        return None if asked == name else found(asked, package)

    monkeypatch.setattr(installation.importlib.util, "find_spec", find_spec)
    return name


@pytest.mark.parametrize("missing", ["torch", "safetensors"], indirect=True)
@pytest.mark.parametrize("verb", ["train", "rehearse", "convert", "checkpoint"])
def test_what_training_needs_is_missed_before_anything_starts(verb: str, missing: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    commands = {
        "train": ["train", *JOB, "--run-folder", str(folder)],
        "rehearse": ["train", *JOB, "--run-folder", str(folder), "--rehearse", "3"],
        "convert": ["convert", str(tmp_path), "--to", "full", "--out", str(folder)],
        "checkpoint": ["checkpoint", "verify", str(tmp_path)],
    }
    line = error_line(run(*commands[verb]))
    title = "PyTorch" if missing == "torch" else "the package safetensors"
    assert line.endswith(f"needs {title}, which is not installed; pip install 'shardwise[train]'")
    assert not folder.exists()


@pytest.mark.parametrize("missing", ["pyarrow", "tokenizers"], indirect=True)
def test_what_data_needs_is_missed_before_a_file_is_read(missing: str, tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("hello")
    (tmp_path / "last.parquet").write_bytes(b"")
    files = [str(tmp_path / "first.txt"), *([str(tmp_path / "last.parquet")] if missing == "pyarrow" else [])]
    how = ["--tokenizer", str(tmp_path)] if missing == "tokenizers" else []
    line = error_line(run("data", "build", *files, "--out", str(tmp_path / "out"), *how))
    assert line.endswith(f"needs the package {missing}, which is not installed; pip install 'shardwise[data]'")
    assert not list(tmp_path.glob("out*"))


def test_a_file_of_an_unknown_kind_is_told_before_another_is_read(tmp_path: Path) -> None:
    (tmp_path / "first.txt").write_text("hello")
    (tmp_path / "last.doc").write_text("hello")
    line = error_line(
        run("data", "build", str(tmp_path / "first.txt"), str(tmp_path / "last.doc"), "--out", str(tmp_path / "out"))
    )
    assert "last.doc: has an unknown suffix" in line
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0a0+git123", "3.0.0"])
def test_a_torch_that_is_not_tested_is_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    require_torch("verify")
    wanted = f"note: PyTorch {version} is not tested here, 2.11 to 2.15 are: pip install 'shardwise[train]'\n"
    assert capsys.readouterr() == ("", wanted)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.1", "2.15.0+cu132", "unknown"])
def test_a_torch_that_is_tested_is_not_spoken_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert torch_notes() == []


def test_the_tested_versions_are_those_that_are_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [one for one in extras["train"] if one.startswith("torch")]
    first, last = TESTED_TORCH
    assert re.findall(r"\d+\.\d+", wanted) == [f"{first[0]}.{first[1]}", f"{last[0]}.{last[1] + 1}"]


def test_a_missing_wandb_names_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"^run\.logging\.wandb: needs the package wandb, .*; pip install wandb$"):
        monkeypatch.setattr(installation, "is_installed", lambda name: name != "wandb")
        installation.require_packages("run.logging.wandb", "wandb")

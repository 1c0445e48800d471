"""Options behind the name of a target: how they are written, and the flags that they were before."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from cli.running import run as shardwise
from launch.targets.test_hosts import refusal
from shardwise.launch.targets.registry import HOSTS, TARGETS, target_named, text_of, words_of
from shardwise.spec.errors import SpecError

SMALL = (
    "--model", "tiny", "--seq", "32", "--global-batch", "4", "--precision", "fp32", "--dp", "2",
    "--cluster", "laptop:2", "--steps", "3",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slurm,time=4:00:00, submit", ["slurm", "time=4:00:00", "submit"]),
        ('slurm,comment="a, b"', ["slurm", "comment=a, b"]),
        (r"slurm,comment=a\, b", ["slurm", "comment=a, b"]),
        ("kubernetes,env=A=1,env=B=#", ["kubernetes", "env=A=1", "env=B=#"]),
        ("my hosts.txt", ["my hosts.txt"]),
    ],
)
def test_commas_separate_unless_they_are_escaped_or_quoted(text: str, words: list[str]) -> None:
    assert words_of(text) == words
    assert words_of(text_of(words)) == words


def test_a_target_has_its_options() -> None:
    assert target_named("ray").option("address") is None
    assert target_named("ray,address=10.0.0.1:6379").option("address") == "10.0.0.1:6379"
    assert target_named("kubernetes,env=A=1,env=B=2").given == {"env": ("A=1", "B=2")}
    assert not TARGETS["ray"].given  # a choice does not change the table


def test_a_file_of_hosts_may_have_any_name_and_has_no_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hosts.txt", "a,b=c"):
        Path(name).write_text("one slots=2\n")
        assert target_named(name).host_names() == ["one"]
    with pytest.raises(SpecError, match=r"'slots' is not an option of hosts\.txt; leave it out"):
        target_named("hosts.txt,slots=3")


def test_every_target_is_listed_with_its_options() -> None:
    rows = json.loads(shardwise("list", "targets", "--json").out)
    assert {row["target"] for row in rows} == {HOSTS.name, *TARGETS}
    listed = {(row["target"], row["option"]) for row in rows}
    assert {("slurm", "submit"), ("ray", "address=..."), ("kubernetes", "runs=..."), ("skypilot", "spot=...")} <= listed
    assert all(row["what"] for row in rows)


def test_flags_of_earlier_versions_still_work_and_say_the_new_form(tmp_path: Path) -> None:
    """Until version 1.0; the note is on standard error."""
    old = ("--on", "slurm", "--sbatch", "time=4:00:00", "--sbatch", "comment=a, b")
    new = ("--on", r"slurm,time=4:00:00,comment=a\, b")
    scripts = []
    for number, given in enumerate((old, new)):
        folder = tmp_path / str(number) / "run"
        found = shardwise("train", *SMALL, "--run-folder", str(folder), "--json", *given)
        assert found.status == 0, found.err
        assert json.loads(found.out)["path"] == f"{folder}/slurm.sh"
        notes = [line.partition("--on ")[2] for line in found.err.splitlines() if "will go in 1.0" in line]
        assert [shlex.split(note) for note in notes] == ([[new[1]]] if given is old else [])
        scripts.append((folder / "slurm.sh").read_text().replace(str(folder), ""))
    assert scripts[0] == scripts[1] and "#SBATCH --comment=a, b\n" in scripts[0]
    large = ("--model", "llama3-8b", "--cluster", "dgx-h100:2", "--tp", "8", "--seq", "4096", "--global-batch", "64")
    manifest = shardwise("train", *large, "--on", "skypilot", "--manifest", "runs=a", "--out", "-")
    assert manifest.out == shardwise("train", *large, "--on", "skypilot,runs=a,out=-").out != ""
    for flag, targets in (
        (("--submit",), "slurm"), (("--sbatch", "time=1"), "slurm"), (("--ray-address", "5"), "ray"),
        (("--manifest", "runs=a"), "kubernetes or skypilot"), (("--out", "-"), "kubernetes or skypilot"),
    ):  # fmt: skip
        assert f"{flag[0]}: is for --on {targets}; leave it out" in refusal("train", *SMALL, *flag)
        assert flag[0] not in shardwise("train", "--help").out

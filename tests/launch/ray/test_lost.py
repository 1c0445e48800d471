"""The head of a Ray cluster is killed under a command: it ends by itself, with its own words, status and record."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.ray.nodes import ray_nodes
from launch.ray.test_ray import SMALL, ended, reaches
from launch.running import wait_until
from models.families import saved

RAYS = re.compile(r"^\[\d{4}-|\w\.(cc|h):\d+|Traceback", re.MULTILINE)  # a line that Ray prints past its loggers


def last_event(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_run_outlives_the_head_and_ends_with_its_record(tmp_path: Path) -> None:
    """Ray would end the process after 60 s; the restarts take longer."""
    folder = tmp_path / "run"
    with ray_nodes(2) as nodes:
        given = (*SMALL, "--steps", "30000", "--wait-for-resources", "5s", "--run-folder", str(folder), "--on", "ray")
        process = nodes.shardwise(*given, log=folder.with_suffix(".log"))
        reaches(process, folder, 5)
        nodes.lose(0)
        status, said = ended(process, folder)
    assert status == 1 and not RAYS.search(said), said
    assert "the cluster has not answered for 25 s: its head may be lost" in said and "gave up after 3 restarts" in said
    assert "the same command resumes from the last checkpoint" in said
    event = last_event(folder)
    assert (event["kind"], event["status"]) == ("ended", 1)


@pytest.mark.slow
def test_a_run_that_ends_well_without_the_head_exits_0(tmp_path: Path) -> None:
    """Its ranks and its launcher are on a node that goes on for a while."""
    folder = tmp_path / "run"
    with ray_nodes(0, 2) as nodes:
        process = nodes.shardwise(
            *SMALL, "--run-folder", str(folder), "--on", "ray", log=folder.with_suffix(".log"), at=1
        )
        reaches(process, folder, 2)
        nodes.lose(0)
        status, said = ended(process, folder)
    assert status == 0 and "Done: " in said and not RAYS.search(said), said
    event = last_event(folder)
    assert (event["kind"], event["status"]) == ("ended", 0)


@pytest.mark.slow
def test_generation_says_only_its_own_words_and_loses_the_head(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    prompts, out, log = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "log.txt"
    lines = out.with_name("out.jsonl.part") / "lines.jsonl"

    def given(count: int) -> tuple[str, ...]:
        prompts.write_text('{"prompt_tokens": [1, 2]}\n' * count)
        files = ("--prompt-file", str(prompts), "--out", str(out))
        return ("generate", str(tmp_path), *files, "--batch-size", "1", "--on", "ray", "--replicas", "1")

    with ray_nodes(2) as nodes:
        assert nodes.shardwise(*given(4), log=log).wait(200) == 0, log.read_text()
        assert all(line.startswith("note: ") for line in log.read_text().splitlines()), log.read_text()
        out.unlink()
        process = nodes.shardwise(*given(5000), log=log)
        wait_until(lambda: process.poll() is not None or (lines.exists() and lines.stat().st_size > 0), 200)
        nodes.lose(0)
        status = process.wait(200)
    said = log.read_text()
    assert status == 1 and not RAYS.search(said), said
    assert re.search(r"^shardwise: error: --on ray: .*; run the same command again: it goes on from there$", said, re.M)

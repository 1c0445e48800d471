"""`generate --on ray`: the same file as without Ray, whatever is killed; stages apart, none far ahead."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.running import run as shardwise
from launch.ray.nodes import RayNodes, ray_nodes
from launch.running import wait_until
from launch.targets.test_hosts import refusal
from models.families import saved
from shardwise.generation.files import batch_offsets, read_prompts

PROMPTS, BATCH = 48, 4
SETTINGS = ("--batch-size", str(BATCH), "--temperature", "0.9", "--max-new-tokens", "40", "--stop", "none")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    saved("llama", folder)
    records = [
        {"id": number, "prompt_tokens": [1 + (7 * number + one) % 50 for one in range(1 + number % 9)]}
        for number in range(PROMPTS)
    ]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def test_batches_are_found_where_they_begin(source: Path, tmp_path: Path) -> None:
    data = tmp_path / "in.jsonl"
    data.write_bytes((source / "in.jsonl").read_bytes().replace(b"\n", b"\n \r\n\n", 20))  # and lines with nothing
    found = batch_offsets(data, 5)
    every = [record for _, record in read_prompts(data, None)]
    assert len(found) == -(-PROMPTS // 5)
    for number, offset in enumerate(found):
        assert next(read_prompts(data, None, offset))[1] == every[5 * number]


def test_what_is_refused(source: Path, tmp_path: Path) -> None:
    files = ("--prompt-file", str(source / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"))

    def refused(*more: str) -> str:
        return refusal("generate", str(source), *more)

    assert "--on: 'slurm': files of prompts are generated here or on ray" in refused(*files, "--on", "slurm")
    assert "--on: ray is for a file of prompts" in refused("--prompt-tokens", "1,2", "--on", "ray")
    assert "--replicas: is for --on ray" in refused(*files, "--replicas", "2")
    assert "--ray-address: is for --on ray" in refused(*files, "--ray-address", "10.0.0.1:6379")
    assert "'adress' is not an option of ray; did you mean address?" in refused(*files, "--on", "ray,adress=1")
    assert "--replicas" in refused(*files, "--on", "ray", "--replicas", "none")
    assert list(tmp_path.iterdir()) == []


# -- a real cluster ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(4) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> bytes:
    """The file without Ray."""
    out = source / "undisturbed.jsonl"
    found = shardwise("generate", str(source), "--prompt-file", str(source / "in.jsonl"), "--out", str(out), *SETTINGS)
    assert found.status == 0, found.err
    return out.read_bytes()


def command(source: Path, out: Path, *more: str) -> tuple[str, ...]:
    files = ("--prompt-file", str(source / "in.jsonl"), "--out", str(out))
    return ("generate", str(source), *files, *SETTINGS, "--on", "ray", "--replicas", "2", *more)


def actors(nodes: RayNodes, stage: str) -> list[int]:
    """The processes of a stage, which Ray names after it."""
    found = []
    for pid in nodes._pids(0):
        try:
            name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if name.startswith("ray::") and f"Map({stage})" in name:
            found.append(pid)
    return found


def lines(path: Path) -> int:
    part = path.with_name(f"{path.name}.part") / "lines.jsonl"
    return part.read_bytes().count(b"\n") if part.exists() else 0


@pytest.mark.slow
def test_actors_and_the_command_are_killed_and_the_file_is_the_same(
    nodes: RayNodes, source: Path, undisturbed: bytes, tmp_path: Path
) -> None:
    out, log = tmp_path / "out.jsonl", tmp_path / "log.txt"
    running = nodes.shardwise(*command(source, out), log=log)
    try:
        wait_until(lambda: lines(out) >= 2 * BATCH or running.poll() is not None, 300)
        stages = {stage: set(actors(nodes, stage)) for stage in ("Tokenise", "Generate", "WriteText")}
        assert [len(found) for found in stages.values()] == [1, 2, 1], log.read_text()
        assert len(set.union(*stages.values())) == 4  # in processes of their own
        for stage in stages:
            os.kill(min(stages[stage]), signal.SIGKILL)
        before = lines(out)
        wait_until(lambda: lines(out) > before or running.poll() is not None, 300)
        assert running.poll() is None, log.read_text()
        running.kill()  # and now the command itself
        running.wait()
        kept = lines(out)
        assert 0 < kept < PROMPTS and not out.exists()
        running = nodes.shardwise(*command(source, out, "--json"), log=log)
        assert running.wait(timeout=400) == 0, log.read_text()
    finally:
        running.kill()
    assert out.read_bytes() == undisturbed
    said = json.loads(log.with_suffix(".out").read_text())
    assert said["prompts"] == PROMPTS and 0 < said["tokens"] < PROMPTS * 40  # what was there was not made again
    assert not out.with_name("out.jsonl.part").exists()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_no_room_is_said(nodes: RayNodes, source: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out.jsonl", tmp_path / "log.txt"
    asked = (*command(source, out)[:-1], "40", "--wait-for-resources", "1s")
    assert nodes.shardwise(*asked, log=log).wait(timeout=200) == 1
    (said,) = (line for line in log.read_text().splitlines() if line.startswith("shardwise: error: "))
    assert "no place for 40 model actors within 1 s: asked for 45 CPUs; present: 4 CPUs, of which 4 are free" in said


_STREAM = """
import time
from pathlib import Path
from shardwise.generation import on_ray
from shardwise.generation.request import GenerationRequest

class Tokenise(on_ray.Tokenise):
    def __call__(self, row):
        Path(SEEN, str(row["first"])).touch()
        return super().__call__(row)

class Generate(on_ray.Generate):
    def __call__(self, row):
        if row["first"] == 0:  # until the stage before has nothing more to do, or waits
            seen, quiet = 0, 0
            while seen < PROMPTS and quiet < 50:
                time.sleep(0.2)
                before, seen = seen, len(list(Path(SEEN).iterdir()))
                quiet = quiet + 1 if seen == before else 0
            Path(SEEN).with_name(Path(SEEN).name + ".ahead").write_text(str(seen))
        return super().__call__(row)

on_ray.Tokenise, on_ray.Generate, on_ray.ROWS_AHEAD = Tokenise, Generate, MOST
request = GenerationRequest(SOURCE, max_new_tokens=1, batch=1)
work = on_ray.RayPrompts(DATA, "out", None, {}, None, 60.0, 1)
print(len(list(work._streamed(request, on_ray._Wanted(1, "cpu"), 0))))
"""


@pytest.mark.slow
def test_a_stage_waits_for_the_next_once_so_many_rows_lie_between_them(
    nodes: RayNodes, source: Path, tmp_path: Path
) -> None:
    data, prompts = tmp_path / "in.jsonl", 40
    data.write_text('{"prompt_tokens": [1, 2]}\n' * prompts)

    def ahead(rows: int) -> int:
        """Prompts that were tokenised before the model had done the first."""
        seen = tmp_path / str(rows)
        seen.mkdir()
        values = {"MOST": rows, "SOURCE": str(source), "DATA": str(data), "SEEN": str(seen), "PROMPTS": prompts}
        program = _STREAM
        for name, value in values.items():
            program = program.replace(name, repr(value))
        assert nodes.ask(program).split()[-1] == str(prompts)
        return int(seen.with_name(f"{seen.name}.ahead").read_text())

    assert 1 <= ahead(4) < prompts // 2
    assert ahead(1000) == prompts  # there is room for all of it


@pytest.mark.slow
def test_a_node_is_lost_and_another_comes(nodes: RayNodes, source: Path, undisturbed: bytes, tmp_path: Path) -> None:
    out, log = tmp_path / "out.jsonl", tmp_path / "log.txt"
    lost = nodes.add(2)
    running = nodes.shardwise(*command(source, out)[:-1], "4", log=log)  # 5 cores: one model is on the second node
    try:
        wait_until(lambda: lines(out) >= 2 * BATCH or running.poll() is not None, 300)
        assert running.poll() is None, log.read_text()
        nodes.lose(lost)
        nodes.add(2)
        assert running.wait(timeout=400) == 0, log.read_text()
    finally:
        running.kill()
    assert out.read_bytes() == undisturbed


@pytest.mark.slow
def test_a_model_on_two_ranks_of_an_actor_one_of_which_is_killed(nodes: RayNodes, source: Path, tmp_path: Path) -> None:
    here, out, log = tmp_path / "here.jsonl", tmp_path / "out.jsonl", tmp_path / "log.txt"
    files = ("--prompt-file", str(source / "in.jsonl"), "--out")
    assert shardwise("generate", str(source), *files, str(here), *SETTINGS, "--tp", "2").status == 0
    asked = ("generate", str(source), *files, str(out), *SETTINGS, "--tp", "2", "--on", "ray", "--replicas", "1")
    running = nodes.shardwise(*asked, log=log)
    try:
        wait_until(lambda: lines(out) >= 2 * BATCH or running.poll() is not None, 300)
        assert running.poll() is None, log.read_text()
        ranks = served(nodes)
        assert len(ranks) == 2
        os.kill(max(ranks), signal.SIGKILL)
        assert running.wait(timeout=400) == 0, log.read_text()
    finally:
        running.kill()
    assert out.read_bytes() == here.read_bytes()
    wait_until(lambda: not served(nodes), 30)
    asked = (*asked[:-1], "9", "--out", str(tmp_path / "other.jsonl"), "--wait-for-resources", "1s")
    assert nodes.shardwise(*asked, log=log).wait(timeout=200) == 1
    assert "no place for 9 model actors of 2 ranks on one node within 1 s: asked for 20 CPUs" in log.read_text()


def served(nodes: RayNodes) -> list[int]:
    found = []
    for pid in nodes._pids(0):
        try:
            if "shardwise.generation.served" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return found

"""Files of prompts: one line for each, in their order, whatever happens in between."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from engine.workers import PRELOAD
from generation.cases import NEW, PROMPTS, model_of, tokens_of
from models.families import saved
from shardwise.api.generation import generate
from shardwise.generation.files import PartialFile
from shardwise.generation.request import GenerationRequest
from shardwise.spec.errors import SpecError

LINES = 12
PART = "out.jsonl.part/lines.jsonl"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, and prompts beside it."""
    folder = tmp_path_factory.mktemp("weights")
    saved("llama", folder)
    records = [{"id": f"n{one}", "prompt_tokens": list(PROMPTS[one % 3][: 1 + one])} for one in range(LINES)]
    text = "\n".join(json.dumps(one) for one in records)
    (folder / "in.jsonl").write_text(text.replace("\n", "\n\n", 1))  # an empty line; none ends the file
    return folder


def asked(source: Path, out: Path, **changes: Any) -> dict[str, Any]:
    settings = {
        "prompt_file": source / "in.jsonl",
        "out": out,
        "max_new_tokens": NEW,
        "batch_size": 5,
        "temperature": 0.9,
    }
    return {"source": source, **settings, **changes}


def test_every_prompt_has_a_line_in_its_place(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = generate(**asked(source, tmp_path / "out.jsonl", temperature=0), on_done=lambda *done: seen.append(done))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["id"] for one in lines] == [f"n{one}" for one in range(LINES)]
    request = GenerationRequest(str(source), max_new_tokens=NEW)
    model = model_of(request)
    for one in lines:
        (wanted,) = tokens_of(model, request, [one["prompt_tokens"]])
        assert one["generated"] == {"tokens": wanted, "reason": "length"}
    assert seen == [(0, LINES), (5, LINES), (10, LINES), (LINES, LINES)]
    assert found.found.prompts == LINES and found.found.times.tokens == LINES * NEW
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def killed_after(batches: int, arguments: dict[str, Any]) -> None:
    """A process that generates, stops for good after some batches, and is killed there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    marker = Path(arguments["out"]).with_name("reached")
    process = context.Process(target=_until, args=(batches, arguments, str(marker)))
    process.start()
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    marker.unlink()


def _until(batches: int, arguments: dict[str, Any], marker: str) -> None:
    def on_done(done: int, total: int) -> None:
        if done == batches * arguments["batch_size"]:
            Path(marker).touch()
            time.sleep(600)

    generate(**arguments, on_done=on_done)


def test_a_run_that_was_killed_goes_on_to_the_same_file(source: Path, tmp_path: Path) -> None:
    generate(**asked(source, tmp_path / "undisturbed.jsonl"))
    whole = (tmp_path / "undisturbed.jsonl").read_bytes()
    arguments = asked(source, tmp_path / "out.jsonl")
    killed_after(1, arguments)
    part = tmp_path / PART
    first = b"".join(whole.splitlines(keepends=True)[:5])
    assert part.read_bytes() == first and not (tmp_path / "out.jsonl").exists()
    for torn in (whole[len(first) :][:-40], whole[len(first) :][:7], b"\0" * 9 + b"\n", b'{"id":'):
        part.write_bytes(first + torn)  # a batch that was not written whole, and half of a line
        seen: list[int] = []
        if torn == b'{"id":':
            generate(**arguments, on_done=lambda done, total, seen=seen: seen.append(done))
            assert seen[0] == 5
        else:
            file = PartialFile(tmp_path / "out.jsonl", {})
            with file.opened():
                assert file.whole_batches(5) == (10 if torn == whole[len(first) :][:-40] else 5)
            assert whole.startswith(part.read_bytes())
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert not part.parent.exists()


def refused(arguments: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as error:
        generate(**arguments)
    return str(error.value)


def test_lines_of_another_request_are_not_continued(source: Path, tmp_path: Path) -> None:
    arguments = asked(source, tmp_path / "out.jsonl")
    killed_after(1, arguments)
    before = (tmp_path / PART).read_bytes()
    assert "was begun with temperature 0.9, now it is 0.7" in refused({**arguments, "temperature": 0.7})
    assert "was begun with max_new_tokens 12, now it is 3" in refused({**arguments, "max_new_tokens": 3})
    other = tmp_path / "other.jsonl"
    other.write_text((source / "in.jsonl").read_text() + '\n{"prompt_tokens": [1]}')
    assert "was begun with sha256 of the prompts" in refused({**arguments, "prompt_file": other})
    file = PartialFile(tmp_path / "out.jsonl", {})
    with file.opened():
        assert "another process is writing" in refused(arguments)
    assert (tmp_path / PART).read_bytes() == before
    (tmp_path / "out.jsonl").touch()
    assert "out.jsonl is already there" in refused(arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":3: is not JSON; one object on every line"),
        ("[1]", ":3: [1] is not an object"),
        ("{}", ":3: has no prompt"),
        ('{"prompt_tokens": [1.5]}', ":3: prompt_tokens is not a list of token ids"),
        ('{"prompt_tokens": []}', ":3: is empty; give at least one token"),
        ('{"prompt_tokens": [61]}', ":3: holds the token 61, and"),
        ('{"prompt": "hello"}', ":3: is text, and these weights come without a tokenizer.json"),
    ],
)
def test_a_line_that_is_wrong_is_named_before_anything_starts(
    line: str, message: str, source: Path, tmp_path: Path
) -> None:
    data = tmp_path / "in.jsonl"
    data.write_text(f'{{"prompt_tokens": [1]}}\n\n{line}\n')
    assert message in refused(asked(source, tmp_path / "out.jsonl", prompt_file=data))
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]

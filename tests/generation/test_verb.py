"""`shardwise generate` as a user runs it: text, ranks, weights from any layout, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.running import error_line, run, run_json
from engine.workers import on_ranks
from generation.cases import PROMPTS, tokens_of
from models.families import saved
from shardwise import generate
from shardwise.generation.decoding import NextToken
from shardwise.generation.files import GrowingText
from shardwise.generation.request import GenerationRequest
from shardwise.models import Decoder, initialise
from shardwise.run.data.token_files import ByteTokenizer
from shardwise.spec import Job
from training.runs import job_of

ROOT = Path(__file__).parents[2]
IDS = ",".join(map(str, PROMPTS[0]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of 61 words, the first of which begins a text and the second ends it."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("llama")
    saved("llama", path)
    words = {"<s>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, 61)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(path / "tokenizer.json"))
    return path


def test_text_goes_in_and_comes_out(folder: Path) -> None:
    pieces: list[tuple[int, str]] = []
    found = generate(
        folder, "w5 w7", prompt_tokens=[[0, 5, 7]], max_new_tokens=6, on_text=lambda *one: pieces.append(one)
    )
    assert found.tokens[0] == found.tokens[1]  # the tokenizer begins a text
    assert found.texts[0] == "".join(f" w{token}" for token in found.tokens[0])  # as it follows the prompt
    for number in (0, 1):
        assert "".join(piece for prompt, piece in pieces if prompt == number) == found.texts[number]
    assert found.first_token_seconds > 0 and found.tokens_per_second > 0
    shown = run("generate", str(folder), "--prompt", "w5 w7", "--max-new-tokens", "6")
    assert shown.status == 0 and shown.err == ""
    assert shown.out.splitlines()[0] == found.texts[0] and "tokens/s, first token after" in shown.out


def test_a_checkpoint_keeps_the_tokenizer_of_the_weights_it_came_from(folder: Path, tmp_path: Path) -> None:
    assert run("convert", str(folder), "--to", "checkpoint", "--out", str(tmp_path)).status == 0
    wanted = generate(folder, "w5 w7", max_new_tokens=4).texts
    for source in (tmp_path, tmp_path / "step-00000000"):
        assert generate(source, "w5 w7", max_new_tokens=4).texts == wanted


def test_the_folder_says_which_token_ends_a_text(folder: Path, tmp_path: Path) -> None:
    free = run_json("generate", str(folder), "--prompt-tokens", IDS, "--max-new-tokens", "5", "--stop", "none")
    (ends,) = (one["tokens"] for one in free["results"])
    for flags, config in ((["--stop", str(ends[1])], None), ([], {"eos_token_id": [60, ends[1]]})):
        if config is not None:
            (folder / "generation_config.json").write_text(json.dumps(config))
        found = run_json("generate", str(folder), "--prompt-tokens", IDS, "--max-new-tokens", "5", *flags)
        (one,) = found["results"]
        assert one["tokens"] == ends[: ends.index(ends[1]) + 1] and one["reason"] == "stop"
    (folder / "generation_config.json").write_text("{}")


def test_local_ranks_are_started_and_give_the_same_text(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "in.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"w{one}", "n": one}) + "\n" for one in range(5)))
    outs = []
    for tp in ("1", "2"):
        outs.append(tmp_path / f"out-{tp}.jsonl")
        flags = [
            "--prompt-file",
            str(data),
            "--out",
            str(outs[-1]),
            "--tp",
            tp,
            "--batch-size",
            "2",
            "--max-new-tokens",
            "4",
        ]
        found = run_json("generate", str(folder), *flags)
        assert found["prompts"] == 5 and found["tokens"] == 20 and found["tp"] == int(tp)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert [json.loads(line)["n"] for line in outs[0].read_text().splitlines()] == list(range(5))


def saved_in(job: Job, folder: str) -> None:
    from shardwise.engine.engine import Engine
    from shardwise.run.checkpoint.folder import CheckpointFolder
    from shardwise.training.checkpoint.save import Saver

    saver = Saver(Engine(job, seed=3), CheckpointFolder(Path(folder)))
    saver.save(7, {"data": {"batch": 0, "left_out": [], "sequences": 8}, "losses": []}, wait=True)
    saver.finish()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}], ids=["zero-3", "tp", "pp"])
def test_weights_are_read_from_any_layout(strategy: dict[str, Any], tmp_path: Path) -> None:
    """Their values follow from the seed alone."""
    job = job_of("", 2, **strategy)
    on_ranks(2, saved_in, job, str(tmp_path / "checkpoints"))
    decoder = Decoder(job.model).eval()
    initialise(decoder, 3, job.model)
    wanted = tokens_of(NextToken(decoder), GenerationRequest("", max_new_tokens=6), [PROMPTS[0]])
    found = generate(tmp_path, prompt_tokens=[PROMPTS[0]], max_new_tokens=6)
    assert found.tokens == wanted and found.texts == (None,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prompt-tokens 1 --pp 2", "--pp: '2': a pipeline does not generate"),
        ("--prompt-tokens 1 --cp 4", "--cp: '4': context parallelism does not generate"),
        ("--prompt-tokens 1 --dp 2", "--dp: '2': copies of the model do not generate together"),
        ("--prompt-tokens 1 --ep 2", "--ep: '2': expert parallelism does not generate"),
        ("--prompt-tokens 1 --tp 3", "--tp: 3 does not divide 4 query heads; use 2 or 4"),
        ("--prompt-tokens 1 --tp 0", "--tp: '0' is not a positive whole number"),
        ("--prompt-tokens 1 --run-device cuda", "--run-device: cuda"),
        ("--prompt-tokens 1,x", "--prompt-tokens: '1,x' are not token ids"),
        ("--prompt-tokens 61", "--prompt-tokens: holds the token 61, and"),
        ("--prompt-tokens 1 --stop 61", "--stop: 61 is not a token"),
        ("--prompt-tokens 1 --top-p 0.5", "--top-p: is for sampling"),
        ("--prompt-tokens 1 --temperature 1 --top-p 1.5", "--top-p: 1.5 is not a probability"),
        ("--prompt-tokens 1 --temperature nan", "--temperature: nan is not a finite number"),
        ("--prompt-tokens 1 --temperature 1 --top-k 0", "--top-k: 0; use 1 or more"),
        ("--prompt-tokens 1 --max-new-tokens 0", "--max-new-tokens: '0' is not a positive whole number"),
        ("--prompt-tokens 1 --seed -1", "--seed: -1 is out of range"),
        ("", "--prompt: there is none"),
        ("--prompt-tokens 1 --prompt-file x --out y", "--prompt-file: cannot be combined with prompts"),
        ("--prompt-file x", "--out: is needed with --prompt-file"),
        ("--prompt-tokens 1 --tokenizer nowhere.json", "nowhere.json: is not there"),
        ("--prompt x --model gpt2", "but gpt2 makes it [50257, 768]"),
    ],
)
def test_what_does_not_run_is_refused_in_one_line(flags: str, message: str, folder: Path) -> None:
    assert message in error_line(run("generate", str(folder), *flags.split()))


def test_lengths_that_do_not_run_are_refused(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "gpt2")
    saved("phi3-long", tmp_path / "phi3")
    assert (
        run("generate", str(tmp_path / "gpt2"), "--prompt-tokens", "1,2", "--max-new-tokens", "63", "--json").status
        == 0
    )
    line = error_line(
        run("generate", str(tmp_path / "gpt2"), "--prompt-tokens", "1,2", "--max-new-tokens", "64", "--json")
    )
    assert "2 tokens and 64 new ones, but gpt2 has 64 positions; lower --max-new-tokens" in line
    flags = ("--prompt-tokens", "1,2", "--json", "--max-new-tokens")
    assert run("generate", str(tmp_path / "phi3"), *flags, "7").status == 0
    line = error_line(run("generate", str(tmp_path / "phi3"), *flags, "8"))
    assert "longrope rotates otherwise" in line


def test_text_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    line = error_line(run("generate", str(tmp_path), "--prompt", "hello"))
    assert "comes without a tokenizer.json; give token ids: --prompt-tokens 1,2,3" in line


def test_a_character_appears_once_all_of_its_bytes_are_there() -> None:
    text = "aé√🦙b"
    growing = GrowingText(ByteTokenizer())
    pieces = [growing.add(token) for token in text.encode()]
    assert [piece for piece in pieces if piece] == list(text) and growing.rest() == ""
    growing = GrowingText(ByteTokenizer())
    assert [growing.add(token) for token in "é".encode()[:1]] == [""] and growing.rest() == "\ufffd"


@pytest.mark.slow
def test_ranks_of_torchrun_take_part(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29577"]
    command += ["-m", "shardwise", "generate", str(folder), "--prompt", "w5 w7", "--json", "--max-new-tokens", "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tp"] == 2 and found["results"] == run_json("generate", str(folder), *command[-5:])["results"]


@pytest.mark.slow
def test_a_file_survives_a_lost_rank_and_a_killed_command(folder: Path, tmp_path: Path) -> None:
    """Ranks end with the command that started them; what they leave is whole, and is continued."""
    data, out, part = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.part" / "lines.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"w{one % 61}", "n": one}) + "\n" for one in range(1200)))
    flags = ["--prompt-file", str(data), "--out", str(out), "--tp", "2", "--max-new-tokens", "5", "--batch-size", "10"]
    command = [sys.executable, "-m", "shardwise", "generate", str(folder), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def started(least_bytes: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 200
        while not (part.exists() and part.stat().st_size > least_bytes):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return process

    first = started(2_000)
    os.kill(children(children(first.pid)[-1])[-1], signal.SIGKILL)
    told = first.communicate(timeout=60)[1].splitlines()
    assert first.returncode == 1 and len(told) == 1 and "was lost" in told[0] and "the same command again" in told[0]
    second = started(part.stat().st_size + 2_000)
    ranks = children(children(second.pid)[-1])
    assert len(ranks) == 2
    second.kill()
    second.wait()
    deadline = time.monotonic() + 60
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not out.exists()
    assert run("generate", str(folder), *flags).status == 0
    assert [json.loads(line)["n"] for line in out.read_text().splitlines()] == list(range(1200))


def children(process: int) -> list[int]:
    """The last child of a command that uses processes is the one that forks them."""
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without the instructions, which is told
def test_weights_of_half_precision_run_as_they_are_stored(folder: Path) -> None:
    for dtype in ("bf16", "fp16"):
        found = generate(folder, prompt_tokens=PROMPTS, max_new_tokens=5, dtype=dtype)
        assert [len(one) for one in found.tokens] == [5, 5, 5]
    assert torch.get_default_dtype() == torch.float32

"""One command from a folder and conversations to an adapter: method, price, loss, sample; and mistakes in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise
from cli.running import error_line, run, run_json
from run.data.chats import CHATML, make_tokenizer, said, write_lines
from shardwise.interop.jobs import read_job

ANSWER = "the lazy dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights and a tokenizer, as transformers saves them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = make_tokenizer(tmp_path_factory.mktemp("model") / "tiny-llama", CHATML)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=400, max_position_embeddings=512, num_key_value_heads=2, eos_token_id=3, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Every question has the same answer: what the model has to learn."""
    questions = [f"What is {number} and two?" for number in range(160)]
    return write_lines(tmp_path / "chats.jsonl", [{"messages": said(question, ANSWER)} for question in questions])


def command(folder: Path, chats: Path, *more: str) -> list[str]:
    out = str(chats.parent / "out")
    return ["finetune", "--model", str(folder), "--data", str(chats), "--out", out, "--seq", "64", *more]


def test_an_adapter_learns_a_planted_answer(folder: Path, chats: Path) -> None:
    options = ("--method", "lora", "--steps", "60", "--learning-rate", "0.01", "--global-batch", "8")
    data = run_json(*command(folder, chats, *options))
    assert data["method"] == "lora" and "LoRA fits" in data["reason"]
    assert data["labels"] < data["tokens"] and data["predicted_seconds"] > 0
    assert ANSWER in data["sample"]["after"] and ANSWER not in data["sample"]["before"]
    written = Path(data["written"])
    assert json.loads((written / "adapter_config.json").read_text(encoding="utf-8"))["r"] == 16
    over_it = error_line(run(*command(Path(data["folder"]), chats, "--plan-only")))
    assert "is a run; convert it with --to huggingface, and name that folder" in over_it


@pytest.mark.slow
def test_the_example_learns_its_habit(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "finetune.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.startswith(("before:", "after:"))]
    assert len(answers) == 4 and [answer.endswith(", says the fox.") for answer in answers] == [False] * 3 + [True]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_started_again_it_ends_at_once_and_with_more_steps_it_goes_on(folder: Path, chats: Path, method: str) -> None:
    def trained(steps: int) -> Any:
        return run_json(*command(folder, chats, "--method", method, "--steps", str(steps), "--global-batch", "4"))

    first, again, more = trained(2), trained(2), trained(3)
    assert first["written"] == again["written"] == more["written"]
    assert (again["training"]["attempts"], more["training"]["steps"]) == (0, 3)
    assert again["sample"] == first["sample"] and first["sample"]["prompt"]
    job = read_job(Path(first["folder"]) / "job.yaml")
    assert job.sequences == 4 and job.training.base_precision == ("nf4-double" if method == "qlora" else "computed")


def test_a_folder_needs_no_slash(folder: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(*command(Path(folder.name), chats, "--plan-only")).status == 0


def test_the_plan_is_shown_before_anything_is_trained(folder: Path, chats: Path) -> None:
    result = run(*command(folder, chats, "--plan-only"))
    assert result.status == 0, result.err
    for words in ("full fine-tuning fits", "memory:", "time:", "160 conversations", "sequences of 64 tokens"):
        assert words in " ".join(result.out.split())
    cut = run(*command(folder, chats, "--plan-only", "--seq", "1024")).out
    assert "are longer than the 512 of tiny-llama" in " ".join(cut.split())
    assert not (chats.parent / "out" / "metrics.jsonl").exists()


def test_the_method_follows_from_the_card(folder: Path, chats: Path, tmp_path: Path) -> None:
    card = {
        "device": {
            "name": "card", "memory": "1.56GiB", "memory_bandwidth": "1TB/s", "vendor": "nvidia",
            "peak": {"bf16": "100TFLOPS", "fp32": "50TFLOPS"},
        },
        "levels": [{"size": 1, "link": "pcie-4"}],
    }  # fmt: skip
    (tmp_path / "card.yaml").write_text(json.dumps(card), encoding="utf-8")
    data = run_json(*command(folder, chats, "--plan-only", "--cluster", str(tmp_path / "card.yaml")))
    assert data["memory_bytes"] < 1.56 * 2**30


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"messages": [{"role": "user", "content": "hello"}]}], "no turn of the assistant"),
        ([{"messages": [{"role": "robot", "content": "hello"}]}], "robot"),
        ([], "holds no text"),
    ],
)
def test_bad_data_is_one_line(folder: Path, tmp_path: Path, records: list[Any], words: str) -> None:
    bad = write_lines(tmp_path / "chats.jsonl", records)
    assert words in error_line(run(*command(folder, bad)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps: '0' is not a positive whole number"),
        (["--epochs", "-1"], "--epochs: '-1' is not positive"),
        (["--learning-rate", "nan"], "--learning-rate: 'nan' is not"),
        (["--global-batch", "1.5"], "--global-batch: '1.5' is not"),
        (["--adapter-rank", "5000"], "--adapter-rank: 5000 is above 4096"),
        (["--precision", "bf61"], "--precision: 'bf61' is not a recipe; did you mean bf16"),
        (["--cluster", "rtx-4090"], "unknown cluster 'rtx-4090'"),
        (["--method", "full", "--dora"], "--dora: changes adapters"),
        (["--method", "full", "--adapter-rank", "8"], "--adapter-rank: changes adapters"),
    ],
)
def test_odd_options_are_refused_before_the_data_is_read(
    folder: Path, chats: Path, options: list[str], words: str
) -> None:
    assert words in error_line(run(*command(folder, chats, *options)))
    assert not (chats.parent / "out").exists()


def test_a_place_that_cannot_be_written_is_one_line(folder: Path, chats: Path) -> None:
    for place in (chats, chats / "out"):
        assert "cannot be written" in error_line(run(*command(folder, chats, "--out", str(place))))


def test_data_that_cannot_be_trained_on_is_refused_with_the_plan(folder: Path, tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", [{"messages": said("hi", ANSWER)}])
    assert "has one document" in error_line(run(*command(folder, one, "--plan-only")))


def test_epochs_are_passes_over_the_data(folder: Path, chats: Path) -> None:
    whole, more = (
        run_json(*command(folder, chats, "--plan-only", "--global-batch", batch))["steps"] for batch in ("1", "4096")
    )
    assert more == 1 < 100 < whole < 3 * 160


def test_named_adapters_are_trained(folder: Path, chats: Path) -> None:
    assert run_json(*command(folder, chats, "--plan-only", "--dora"))["method"] == "lora"


def test_eight_bits_are_for_wide_bases(folder: Path, chats: Path) -> None:
    """Weights in 4 bits are made 16 bits wide for their products."""

    def precision(method: str) -> tuple[str, bool]:
        options = {"precision": "fp8", "compile": True, "plan_only": True, "cluster": "dgx-h100:1"}
        training = shardwise.finetune(folder, chats, out=chats.parent, method=method, **options).ready.job.training
        return training.precision, training.compile

    assert precision("lora") == ("fp8", True) and precision("qlora") == ("bf16", True)


def test_a_prompt_without_room_for_an_answer_is_no_sample(
    folder: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.api import fine_tuning

    monkeypatch.setattr(fine_tuning, "SAMPLE_TOKENS", 512)
    options = ("--method", "lora", "--steps", "1", "--global-batch", "4")
    data = run_json(*command(folder, chats, *options))
    assert data["sample"] is None and Path(data["written"]).is_dir()
    other = run(*command(folder, chats, *options, "--adapter-rank", "4"))
    assert other.status == 2 and "training.adapters.rank: is 4, but 16 in the run" in other.err
    assert "name another folder (--out)" in other.err and "--go-on" not in other.err
    before = {path: path.read_bytes() for path in Path(data["written"]).parent.rglob("conversations*")}
    others = chats.with_name("others.jsonl")
    others.write_text("".join(chats.read_text(encoding="utf-8").splitlines(keepends=True)[:100]), encoding="utf-8")
    other = run(*command(folder, others, *options, "--out", str(Path(data["written"]).parent)))
    assert other.status == 2 and "--data: is" in other.err
    assert before and all(path.read_bytes() == content for path, content in before.items())


def test_a_folder_without_a_model_is_one_line(tmp_path: Path, chats: Path) -> None:
    assert "not a Hugging Face folder" in error_line(run(*command(tmp_path, chats)))


def test_a_folder_without_a_tokenizer_is_told_so(
    folder: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = Path("models", "bare")  # as a hub id would be
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, named, ignore=shutil.ignore_patterns("tokenizer*"))
    assert "has no tokenizer.json" in error_line(run(*command(named, chats)))


def test_a_base_in_four_bits_stays_in_four_bits(folder: Path, chats: Path, tmp_path: Path) -> None:
    quantised = tmp_path / "quantised"
    shutil.copytree(folder, quantised)
    config = json.loads((quantised / "config.json").read_text())
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    for method, words in ((), "QLoRA fits"), (("--method", "full"), "dequantised first"):
        shown = run(*command(quantised, chats, "--plan-only", *method))
        assert words in " ".join(shown.out.split()), shown.err
        assert "keeps its weights in 4 bits" in " ".join(shown.out.split())

"""A mistake on the command line: status 2 and one line with the field, the value and what would fix it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import error_line, run
from shardwise.cli.main import VERBS
from tables import table

JOB = "analyze --model llama3-8b --cluster dgx-h100:2 --global-batch 64 --seq 2048"
BARE = "analyze --layers 32 --hidden 4096 --heads 32 --gpus 64 --global-batch 64"
NUMBERS = f"{BARE} --topology"


@table(
    ("command", "parts"),
    [
        # Degrees that do not fit the model, the cluster or the batch.
        (f"{JOB} --tp 3", ["--tp: 3 does not divide 32 query heads", "use 2 or 4"]),
        (f"{JOB} --tp 64", ["--tp: 64 does not divide 32 query heads", "use 32"]),
        (f"{JOB} --pp 3", ["--pp: 3 does not divide 32 layers", "use 2 or 4, or stage_layers: balanced"]),
        (f"{JOB} --cp 3", ["--cp: 3 does not divide sequence length 2048", "use 2 or 4"]),
        (f"{JOB} --tp 8 --cp 8 --context-method ulysses", ["--cp: 8", "4 query heads per rank", "use 4"]),
        (f"{JOB} --tp 8 --dp 4", ["dp 4", "32 ranks", "16 devices", "use dp 2, or 32 devices"]),
        (f"{JOB} --tp 32", ["tp 32", "does not divide the cluster's 16 devices", "use 32 devices"]),
        (f"{JOB} --ep 2", ["--ep: 2", "llama3-8b has no experts", "use ep 1"]),
        (f"{JOB} --model mixtral-8x7b --ep 3", ["--ep: 3 does not divide 8 experts", "use 2 or 4"]),
        (f"{JOB} --global-batch 63", ["--global-batch: 63 sequences", "use 48 or 64"]),
        (f"{JOB} --shard-group 4", ["--shard-group: 4 needs ZeRO", "set zero to 1, 2 or 3"]),
        (f"{JOB} --pp 4 --schedule interleaved", ["strategy.interleave", "use interleave: 2 or schedule: 1f1b"]),
        (f"{JOB} --interleave 2", ["--interleave: 2 needs schedule: interleaved"]),
        (f"{JOB} --pp 2 --stage-layers 15,16", ["--stage-layers: add up to 31", "llama3-8b has 32"]),
        # Names.
        (f"{JOB} --model llama3-7b", ["--model: unknown model 'llama3-7b'", "did you mean llama3-70b or llama3-8b"]),
        (f"{JOB} --model gpt5", ["--model: unknown model 'gpt5'", "did you mean"]),
        (f"{JOB} --cluster dgx-h10:2", ["--cluster: unknown cluster 'dgx-h10'", "did you mean dgx-h100"]),
        (f"{JOB} --schedule 1f2b", ["--schedule: '1f2b' is not a pipeline schedule", "did you mean 1f1b"]),
        (f"{JOB} --zero 4", ["--zero: '4' is not a choice", "choose one of 0, 1, 2, 3"]),
        (f"{JOB} --precision fp64", ["--precision: 'fp64'", "bf16"]),
        (f"{JOB} --order tp,dp", ["--order", "write it like [tp, cp, dp, pp]"]),
        (f"{JOB} --collective magic", ["--collective: 'magic' is not an algorithm", "list collectives"]),
        (f"{JOB} --collective rng", ["--collective: 'rng' is not an algorithm", "did you mean ring"]),
        ("analyse --model gpt2", ["unknown verb 'analyse'", "did you mean analyze"]),
        ("list modls", ["unknown list 'modls'", "did you mean models"]),
        ("explain al-reduce", ["unknown topic 'al-reduce'", "all-reduce"]),
        # Flags.
        (f"{JOB} --pipeline 3", ["unknown argument '--pipeline'"]),
        (f"{JOB} --modle gpt2", ["unknown argument '--modle'", "did you mean --model"]),
        (f"{JOB} --tp", ["argument --tp: expected one argument", "shardwise analyze --help"]),
        (f"{JOB} a.yaml b.yaml", ["unknown argument 'b.yaml'"]),
        ("analyze", ["model: is missing", "--model llama3-8b"]),
        ("analyze --model gpt2", ["cluster: is missing", "--cluster dgx-h100:4"]),
        ("list", ["required: what"]),
        # Numbers.
        (f"{JOB} --tp two", ["--tp: 'two' is not a quantity", "write it like"]),
        (f"{JOB} --tp -3", ["--tp: -3 is below 1", "use 1 or more"]),
        (f"{JOB} --tp=-3", ["--tp: -3 is below 1", "use 1 or more"]),
        (f"{JOB} --tp 0", ["--tp: 0 is below 1"]),
        (f"{JOB} --tp 1.5", ["--tp: 1.5 is not a whole number"]),
        (f"{JOB} --tp ''", ["--tp: '' is not a quantity"]),
        (f"{JOB} --seq nan", ["--seq: 'nan' is not a quantity"]),
        (f"{JOB} --seq 1e400", ["--seq: '1e400' is not a finite number"]),
        (f"{JOB} --seq 1e19", ["--seq", "out of range"]),
        (f"{JOB} --global-batch 0", ["--global-batch: 0 is not a positive whole number", "16M-tokens"]),
        (f"{JOB} --gpus ''", ["--gpus: '' is not a quantity"]),
        (f"{JOB} --gpus -8", ["--gpus: '-8' is not a positive whole number"]),
        (f"{JOB} --gpus 12", ["gpus: 12 is not a whole number of dgx-h100 nodes of 8", "use 8 or 16"]),
        (f"{JOB} --gpus-per-node 9", ["--gpus-per-node: 9 does not fit dgx-h100", "use at most 8"]),
        (f"{JOB} --model ''", ["--model: '' is not a model"]),
        (f"{JOB} --cluster ''", ["--cluster: '' is not a cluster"]),
        (f"{JOB} --cluster dgx-h100:200000 --gpus 1600000 --global-batch 1600000 --ranks", ["--ranks", "leave it out"]),
        # Any field by name.
        (f"{JOB} --set strategy.tp", ["--set: 'strategy.tp' is not FIELD=VALUE"]),
        (f"{JOB} --set =3", ["--set: '=3' is not FIELD=VALUE"]),
        (f"{JOB} --set strategy.tpp=3", ["strategy.tpp: unknown field", "did you mean tp"]),
        (f"{JOB} --set 'strategy.tp=[1'", ["--set strategy.tp: malformed YAML"]),
        (f"{JOB} --set strategy.tp.x=1 --tp 2", ["strategy.tp.x: tp is '2', which has no fields"]),
        (f"{JOB} --set strategy.offload.optimizer=1.5", ["strategy.offload.optimizer: 1.5 is above 1"]),
        # Bare numbers.
        (f"{NUMBERS} ring --bandwidth -5GB/s", ["--bandwidth: '-5GB/s' is not positive", "above 0"]),
        (f"{NUMBERS} ring --bandwidth 0", ["--bandwidth: '0' is not positive"]),
        (f"{NUMBERS} ring --bandwidth 5Gbps/s", ["--bandwidth: '5Gbps/s' has the unknown unit 'Gbps/s'", "GB/s"]),
        (f"{NUMBERS} ring", ["--bandwidth: is missing"]),
        (f"{NUMBERS} ring --bandwidth 5GB/s,6GB/s", ["--bandwidth: 2 values for a ring", "hierarchical"]),
        (f"{NUMBERS} ring --bandwidth 5GB/s --latency -1us", ["--latency: '-1us' is not positive"]),
        (f"{NUMBERS} ring --bandwidth 5GB/s --latency 1us,2us", ["--latency: 2 values for 1 bandwidths"]),
        (f"{NUMBERS} ring --bandwidth 5GB/s --shape 8x8", ["--shape: '8x8' does not belong to a ring", "--gpus"]),
        (f"{NUMBERS} star --bandwidth 5GB/s", ["--topology: unknown topology 'star'"]),
        (f"{NUMBERS} mesh --bandwidth 5GB/s --shape 8x9", ["--shape: 8x9 multiplies to 72, not 64", "--gpus 72"]),
        (f"{NUMBERS} torus --bandwidth 5GB/s --shape 0x64", ["--shape: '0x64' has an axis of 0"]),
        (f"{NUMBERS} torus --bandwidth 5GB/s --shape 8xx8", ["--shape: '8xx8' is not a shape", "8x8"]),
        (f"{NUMBERS} torus --bandwidth 5GB/s --shape 2x2x4x4", ["--shape: 2x2x4x4 has 4 axes"]),
        (f"{NUMBERS} hierarchical --bandwidth 5GB/s", ["--bandwidth: 1 values for 2 levels"]),
        (f"{NUMBERS} hierarchical --bandwidth 9GB/s,5GB/s --gpus 60", ["--gpus: 60 is not a whole", "use 56 or 64"]),
        (f"{NUMBERS} ring --bandwidth 5GB/s --cluster laptop", ["--cluster: 'laptop' and --topology are mutually"]),
        (f"{NUMBERS} ring --bandwidth 5GB/s --device h1000", ["unknown device 'h1000'", "did you mean"]),
        (f"{BARE} --cluster dgx-h100:8 --model gpt2", ["--model: 'gpt2' and --layers, --hidden, --heads are mutually"]),
        (f"{JOB} --set model=gpt2", ["--model: ", "and --set model are mutually exclusive; give one of them"]),
        (f"{JOB} --set model.layres=2", ["model.layres: unknown field; did you mean layers"]),
        (f"{BARE} --cluster dgx-h100:8 --heads 33", ["--heads: 33 does not divide --hidden 4096"]),
        (f"{BARE} --cluster dgx-h100:8 --params 1e6", ["--params: 1,000,000 is too few", "they need more than"]),
        (f"{BARE} --cluster dgx-h100:8 --params 7B --ffn 8", ["--ffn: '8' and --params are mutually exclusive"]),
        ("analyze --params 7e9 --cluster dgx-h100", ["--layers: is missing"]),
        (f"{JOB} --ffn 11008", ["--ffn: '11008' is not used without --layers and --hidden"]),
        (f"{JOB} --device a100-80gb", ["--device: 'a100-80gb' is not used without --topology"]),
        (f"{JOB} --bandwidth 5GB/s", ["--bandwidth: '5GB/s' is not used without --topology"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_field_value_and_remedy(command: str, parts: list[str]) -> None:
    line = error_line(run(*shlex.split(command)))
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("model: [gpt2\ncluster: laptop\n", ["job.yaml: malformed YAML", "line 2"]),
        ("model: gpt2\nmodel: gpt2\n", ["key 'model' twice, line 2"]),
        ("modl: gpt2\ncluster: laptop\n", ["model: is missing"]),
        ("model: gpt2\ncluster: laptop\nstrateg: {}\n", ["strateg: unknown field", "did you mean strategy"]),
        ("model: gpt2\ncluster: laptop\nstrategy: {tp: 5}\n", ["strategy.tp: 5 does not divide 12", "use 4"]),
        ("model: gpt2\ncluster: laptop\nstrategy: [tp]\n", ["strategy: ['tp'] should be a mapping"]),
        ("model: gpt2\ncluster: laptop\ntraining: {seq: long}\n", ["training.seq: 'long' is not a quantity"]),
        ("model: other.yaml\ncluster: laptop\n", ["model", "other.yaml' is not there"]),
        ("model: other.json\ncluster: laptop\n", ["model", "other.json' is not there"]),
        ("model: {layers: 2}\ncluster: laptop\n", ["model.hidden: is missing"]),
        ("model: gpt2\ncluster: {device: h100-sxm, levels: [{size: 8, bandwidth: -1GB/s, latency: 0}]}\n",
         ["cluster.levels[0].bandwidth: -1000000000 is not positive"]),
        ("just text", ["has no fields"]),
        (b"\xff\xfe", ["cannot be read (not text in UTF-8)"]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_job_file(content: str | bytes, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = error_line(run("analyze", str(path)))
    for part in parts:
        assert part in line


def test_a_job_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "none.yaml' is not there; check the path" in error_line(run("analyze", str(tmp_path / "none.yaml")))
    assert "is a folder; name the file inside it" in error_line(run("analyze", str(tmp_path)))
    assert "model" in error_line(run("analyze", "--model", str(tmp_path), "--cluster", "laptop"))


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("{", ["config.json: malformed JSON"]),
        ("[]", ["should be a mapping of keys"]),
        ("{}", ["model_type: is missing"]),
        ('{"model_type": "lama"}', ["model_type: 'lama' is not supported", "did you mean llama"]),
        ('{"model_type": "llama", "num_attention_heads": "many"}', ["num_attention_heads", "'many'"]),
    ],
)
def test_a_mistake_in_a_hugging_face_config(config: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    line = error_line(run("analyze", "--model", str(tmp_path / "config.json"), "--cluster", "laptop"))
    for part in parts:
        assert part in line


def test_a_hugging_face_folder_stands_wherever_a_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small-one", "tiny", "empty"):
        (tmp_path / name).mkdir()
    for name in ("small-one", "tiny"):
        shape = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **shape}))
    laptop = ("--cluster", "laptop:2", "--seq", "64", "--global-batch", "4")
    for verb in (("analyze",), ("plan",), ("export", "--to", "deepspeed")):
        assert run(*verb, "--model", "small-one", *laptop).status == 0, verb
    assert "small-one" in run("explain", "flops", "--model", "small-one").out
    preset, folder = (run("explain", "flops", "--model", name).out for name in ("tiny", "./tiny"))
    assert preset != folder  # a preset's name is the preset
    line = error_line(run("analyze", "--model", "empty", *laptop))
    assert "'empty' is a folder without a config.json" in line


@table("arguments", [[], ["--help"], ["-h"], ["help"], *([verb, "--help"] for verb in VERBS)])
def test_help_is_no_mistake(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.status, result.err) == (0, "")
    assert "usage: shardwise" in result.out


def test_version() -> None:
    import shardwise

    assert run("--version").out == f"shardwise {shardwise.__version__}\n"


def test_the_process_ends_with_the_status_and_without_a_traceback() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "shardwise", *shlex.split(JOB), "--tp", "3"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == "shardwise: error: --tp: 3 does not divide 32 query heads; use 2 or 4\n"


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m shardwise {JOB} --zero 3 --json | head -c 1"
    process = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "{", "")


@pytest.mark.parametrize(
    "command",
    [
        "status {}", "compare {}", "validate {}", "analyze {}.yaml", "data check {}", "checkpoint {}",
        f"{JOB.replace('analyze', 'report')} --out {{}}.html", "calibrate --out {}.yaml", "generate {} --prompt x",
        "train --model tiny --cluster laptop:1 --seq 32 --global-batch 4 --run-folder {}",
        "train --model tiny --cluster laptop:1 --seq 32 --global-batch 4 --precision fp32 --data {}",
        "train --model tiny --cluster laptop:1 --seq 32 --global-batch 4 --on {}",
    ],
)  # fmt: skip
def test_a_name_that_no_file_system_takes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = error_line(run(*shlex.split(command.format("a" * 300))))
    assert "aaa" in line

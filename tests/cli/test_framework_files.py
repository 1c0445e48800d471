"""Other frameworks' files where a job file stands: priced like any job, and what they leave open is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise
from cli.running import error_line, run, run_json, strict_json
from interop.frameworks.random_jobs import drawn
from interop.published_configs import CATALOGUE
from shardwise.cli.arguments import add_job_arguments, job_from
from shardwise.cli.parser import Parser
from shardwise.interop.frameworks import TARGETS
from shardwise.interop.frameworks.job_fields import effective_fields
from shardwise.spec import Job, SpecError
from shardwise.spec.files import dump_yaml

FILES = {
    "ds_config.json": """{
  "train_batch_size": 1024, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, // 64 ranks
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}, "gradient_clipping": 1.0, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "overlap_comm": true},
}""",
    "pretrain.sh": r"""
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights --vocab-size 128256 \
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel \
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 256 --bf16 --lr 3e-4
""",
    "llama3_8b.toml": """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
tensor_parallel_degree = 8
""",
    "accelerate.yaml": """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 64
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: SHARD_GRAD_OP
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def job_of(*arguments: str) -> Job:
    parser = Parser("analyze", "", "")
    add_job_arguments(parser)
    return job_from(parser.parse(list(arguments)))


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("ds_config.json", "--model llama3-8b", {"dp": 64, "zero": 3, "microbatch": 4, "global_batch": 1024}),
        ("pretrain.sh", "", {"tp": 4, "pp": 4, "dp": 4, "zero": 1, "global_batch": 256, "seq": 8192}),
        ("llama3_8b.toml", "", {"tp": 8, "dp": 8, "zero": 3, "global_batch": 16, "seq": 4096}),
        ("accelerate.yaml", "--model llama3-8b --global-batch 128", {"dp": 64, "zero": 2, "global_batch": 128}),
    ],
)
def test_a_configuration_is_priced_like_a_job(folder: Path, name: str, flags: str, expected: dict[str, Any]) -> None:
    arguments = (str(folder / name), *flags.split(), "--cluster", "dgx-h100:8")
    job = job_of(*arguments)
    plain = {**vars(job.strategy), **vars(job.training)}
    assert {field: plain[field] for field in expected} == expected
    assert (job.model.layers, job.model.kv_heads, job.model.vocab) == (32, 8, 128256)
    result = run("analyze", *arguments, "--json")
    assert result.status == 0, result.err
    assert strict_json(result.out)
    assert all(line.startswith("note: ") for line in result.err.splitlines())


def test_what_has_no_field_and_what_is_assumed_is_said_on_one_line_each(folder: Path) -> None:
    result = run("analyze", str(folder / "ds_config.json"), "--model", "llama3-8b", "--cluster", "dgx-h100:8")
    assert result.err.splitlines() == [
        "note: ds_config.json: a DeepSpeed file (recognised by train_batch_size, train_micro_batch_size_per_gpu, "
        "zero_optimization.stage)",
        "note: stack deepspeed: version 2026 is assumed, the newest known; write deepspeed@2021 for an older one",
        "note: training.seq is not in the file: 2048 is assumed",
    ]
    said = run("analyze", str(folder / "ds_config.json"), "--model", "llama3-8b", "--gpus", "64", "--seq", "512").err
    assert "note: no cluster is given: 64 devices of a dgx-h100 are assumed" in said
    assert "training.seq" not in said


def test_devices_alone_are_a_default_cluster_only_for_a_configuration(folder: Path) -> None:
    config = str(folder / "ds_config.json")
    assert job_of(config, "--model", "llama3-8b", "--gpus", "64") == job_of(
        config, "--model", "llama3-8b", "--cluster", "dgx-h100:8"
    )
    # Batch 1024 is 4 × 4 × 64 ranks, as the file says itself.
    assert job_of(config, "--model", "llama3-8b").cluster.devices == 64
    titan = str(folder / "llama3_8b.toml")
    assert "cluster: is not in a torchtitan configuration" in error_line(run("analyze", titan))
    assert "cluster: is missing" in error_line(run("analyze", "--model", "llama3-8b", "--gpus", "64"))


def test_flags_override_and_are_known_when_the_batch_is_read(folder: Path) -> None:
    """Batch 1024 is 4 × 4 × 64 ranks; tp 8 leaves 8 of the 64 devices, and 64 of 512."""
    config = str(folder / "ds_config.json")
    base = (config, "--model", "llama3-8b")
    assert job_of(*base, "--gpus", "64", "--zero", "1", "--set", "strategy.overlap.dp=false").strategy.zero == 1
    large = job_of(*base, "--gpus", "512", "--tp", "8")
    assert (large.strategy.tp, large.strategy.dp, large.microbatches) == (8, 64, 4)
    line = error_line(run("analyze", *base, "--gpus", "64", "--tp", "8"))
    assert "8 data-parallel ranks = 128" in line
    titan = str(folder / "llama3_8b.toml")
    assert job_of(titan, "--gpus", "64").training.global_batch == 16
    assert job_of(titan, "--gpus", "64", "--tp", "4").training.global_batch == 32  # 2 for each of 16 ranks
    assert job_of(titan, "--gpus", "64", "--model", "llama3-70b").model.layers == 80


@pytest.mark.parametrize(
    ("name", "flags", "parts"),
    [
        ("ds_config.json", "--gpus 64", ["model: is missing"]),
        ("ds_config.json", "--model llama3-8b --gpus 12", ["gpus: 12 is not a whole number"]),
        ("ds_config.json", "--model llama3-8b --gpus 64 --dp two", ["--dp: 'two' is not a quantity"]),
        ("ds_config.json", "--model llama3-8b --gpus 64 --pp -1", ["--pp: '-1'"]),
        ("ds_config.json", "--model llama3-8b --gpus 64 --set strategy.tp=[1]", ["strategy.tp: '[1]'"]),
        ("ds_config.json", "--model llama3-8b --gpus 64 --set strategy=3", ["strategy: 3 should be a mapping"]),
        ("ds_config.json", "--layers 8 --hidden 64 --heads 4 --gpus 64 --set strategy=3", ["strategy: 3 should be"]),
        ("ds_config.json", "--model llama3-8b --gpus 64 --set training=3", ["training: 3 should be a mapping"]),
        ("ds_config.json", "--model llama3-8 --gpus 64", ["model: unknown model 'llama3-8'", "did you mean"]),
        ("accelerate.yaml", "--model llama3-8b --gpus 32", ["accelerate.yaml: num_processes: 64", "--gpus 64"]),
    ],
)
def test_a_mistake_is_one_line(folder: Path, name: str, flags: str, parts: list[str]) -> None:
    line = error_line(run("analyze", str(folder / name), *flags.split()))
    assert all(part in line for part in parts), line


def test_a_mistake_in_the_configuration_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stages": 1}}')
    line = error_line(run("analyze", str(tmp_path / "ds.json"), "--model", "gpt2", "--gpus", "8"))
    assert "ds.json: zero_optimization.stages" in line
    assert "zero_optimization.stage" in line


@pytest.mark.parametrize("framework", TARGETS)
def test_what_export_writes_analyze_reads(framework: str, tmp_path: Path) -> None:
    """Jobs that the framework can say come back as they were, with what it leaves to the script given as flags."""
    for number, job in enumerate(drawn(framework, seed=5, number=4)):
        exported = TARGETS[framework].export(job)
        (name, text), *_ = exported.files.items()
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / "model.yaml").write_text(dump_yaml({**job.model.to_dict(), "name": job.model.name}))
        (tmp_path / "cluster.yaml").write_text(dump_yaml(job.cluster.to_dict()))
        flags = [f"--set={one.field}={json.dumps(one.value)}" for one in exported.elsewhere]
        flags += [f"--model={tmp_path}/model.yaml", f"--cluster={tmp_path}/cluster.yaml"]
        back = job_of(str(tmp_path / name), *flags)
        expected, got = effective_fields(job), effective_fields(back)
        if expected["training.tokens"] is None:  # some must write a number of steps
            got["training.tokens"] = None
        assert got == expected, (framework, number)


def test_other_verbs_read_configurations_too(folder: Path) -> None:
    result = run("export", str(folder / "pretrain.sh"), "--gpus", "64", "--to", "torchtitan")
    assert result.status == 0, result.err
    assert "pipeline_parallel_degree = 4" in result.out
    assert run("explain", "tp", str(folder / "pretrain.sh"), "--gpus", "64").status == 0


# -- our own job files -------------------------------------------------------------------------------


def write_job(folder: Path) -> Path:
    """A job file whose model is the config.json of Llama 3 8B in a folder beside it."""
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(CATALOGUE["meta-llama/Meta-Llama-3-8B"][1]))
    path = folder / "job.yaml"
    path.write_text("model: llama/config.json\ncluster: dgx-h100:2\ntraining: {global_batch: 64}\n")
    return path


def test_a_job_file_may_name_a_hugging_face_config(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    job = shardwise.read_job(path)
    assert (job.model.layers, job.model.hidden, job.cluster.devices) == (32, 4096, 16)
    assert job_of(str(path)) == job
    assert run_json("analyze", str(path))
    path.write_text(path.read_text().replace("llama/config.json", "./llama"))
    assert shardwise.read_job(path) == job
    path.write_text("cluster: dgx-h100:2\n")
    with pytest.raises(SpecError, match="model: is missing"):
        shardwise.read_job(path)
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "lama"}')
    write = "model: llama/config.json\ncluster: dgx-h100:2\n"
    path.write_text(write)
    with pytest.raises(SpecError) as caught:
        shardwise.read_job(path)
    assert caught.value.field == "model.model_type"


def test_our_own_job_file_does_not_load_the_frameworks(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    path.write_text("model: gpt2\ncluster: dgx-h100:2\ntraining: {global_batch: 64}\n")
    code = (
        "import sys\nfrom shardwise.cli.main import main\n"
        f"assert main(['analyze', {str(path)!r}, '--json']) == 0\n"
        "assert not [n for n in sys.modules if n.startswith(('shardwise.interop.fr', 'shardwise.interop.huggingface'))]"
    )
    environment = {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr

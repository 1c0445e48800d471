"""Files of Accelerate and DeepSpeed: every mode by its name, files that name others, batches that do not divide."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from cli.running import run
from interop.frameworks.random_jobs import drawn
from shardwise.interop.frameworks import TARGETS, accelerate, configuration_in, target
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.presets import load

NODE = cluster_from("dgx-h100:1")
VERSION = "Accelerate 1.15.0"
# `DistributedType` and `FP8BackendType` of its accelerate/utils/dataclasses.py.
MODES = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "DEEPSPEED",
         "FSDP", "XLA", "MEGATRON_LM", "MULTI_HPU", "MULTI_NEURON"}  # fmt: skip
BACKENDS = {"NO", "TE", "MSAMP", "AO"}


def test_the_lists_are_those_of_the_installed_version() -> None:
    if (found := find_spec("accelerate")) is None or version("accelerate") != VERSION.split()[1]:
        pytest.skip(f"needs {VERSION}")
    assert TARGETS["accelerate"].names.version == VERSION
    source = ast.parse((Path(str(found.origin)).parent / "utils/dataclasses.py").read_text(encoding="utf-8"))
    values = {
        one.name: {part.value.value for part in one.body if isinstance(part, ast.Assign)}  # type: ignore[attr-defined]
        for one in source.body
        if isinstance(one, ast.ClassDef) and one.name in ("DistributedType", "FP8BackendType")
    }
    assert values == {"DistributedType": MODES, "FP8BackendType": BACKENDS}


@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_is_read_or_refused_by_name(mode: str) -> None:
    text = f"distributed_type: '{mode}'\nmixed_precision: bf16\n"
    if mode in accelerate.NOT_READ:
        with pytest.raises(SpecError, match=f"{mode} is a mode that is not read here"):
            target("accelerate").read(text)
        return
    assert target("accelerate").read(text).devices == (1 if mode == "NO" else None)
    if mode == "NO":
        with pytest.raises(SpecError, match="NO is one process, but the cluster has 8 devices; use gpus=1"):
            target("accelerate").read(text, cluster=NODE)


def test_no_mode_is_made_up() -> None:
    assert {*accelerate.MODES, *accelerate.NOT_READ} == MODES and set(accelerate.FP8_BACKENDS) == BACKENDS


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ("backend: TE", "fp8-delayed"),
        ("fp8_backend: te", "fp8-delayed"),
        ("backend: TE\n  use_mxfp8_block_scaling: true", "mxfp8"),
        ("backend: AO", "fp8"),
        ("backend: MSAMP", "fp8"),
        ("margin: 0", "fp8"),  # none named: torchao is looked for first
        ("backend: 'NO'", "fp8"),
    ],
)
def test_the_backend_of_fp8_says_how_it_scales(settings: str, precision: str) -> None:
    text = f"distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config:\n  {settings}\n"
    assert target("accelerate").read(text).fields["training.precision"] == precision


@pytest.mark.parametrize("precision", ["fp8", "fp8-delayed", "mxfp8"])
def test_fp8_is_written_with_its_backend(precision: str) -> None:
    """torchao beside FSDP2 is refused with `cpu_ram_efficient_loading`, the default of `accelerate launch`."""
    job = next(one for one in drawn("accelerate", 1, 200) if one.strategy.zero == 3 and not one.strategy.offload.any)
    exported = target("accelerate").export(replace(job, training=job.training.unchecked(precision=precision)))
    (text,) = exported.files.values()
    assert "training.precision" not in {one.field for one in exported.lost}
    assert ("backend: AO" in text) == ("fsdp_cpu_ram_efficient_loading: false" in text) == (precision == "fp8")


def test_a_key_needs_no_prefix_and_a_sharding_strategy_may_be_its_number() -> None:
    text = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  {}sharding_strategy: {}\n"
    for number, word in enumerate(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), 1):
        same = [target("accelerate").read(text.format(prefix, value), cluster=NODE).fields
                for prefix in ("fsdp_", "") for value in (word, number, f"'{number}'")]  # fmt: skip
        assert all(one == same[0] for one in same)


def test_the_file_of_deepspeed_beside_it_is_read(tmp_path: Path) -> None:
    named = tmp_path / "ds.json"
    named.write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_batch_size": 32}')
    own = tmp_path / "accelerate.yaml"
    lines = ("distributed_type: DEEPSPEED", "num_processes: 8", "deepspeed_config:", "  deepspeed_config_file: ds.json")
    own.write_text("\n".join(lines))
    together, alone = (
        configuration_in(own, "accelerate").read(cluster=NODE),
        target("deepspeed").read(named.read_text()),
    )
    assert together.fields.items() >= alone.fields.items()
    (note,) = [one for one in target("accelerate").read(own.read_text()).notes if "is not beside this file" in one]
    assert "ds.json" in note and "\n" not in note


def test_a_batch_is_said_in_its_own_numbers_or_divides() -> None:
    """Whatever two or three of its numbers a file has: never a microbatch or an accumulation of 0."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for values in product((8, 12, 24, 32, 100), (None, 1, 2, 3), (None, 1, 3)):
        given = {key: value for key, value in zip(keys, values) if value is not None}
        text = "{" + ", ".join(f'"{key}": {value}' for key, value in given.items()) + "}"
        train, micro, steps = values
        try:
            fields = target("deepspeed").read(text, cluster=NODE).fields
        except SpecError as error:
            assert train % (8 * (micro or 1) * (steps or 1)) or train != 8 * (micro or 1) * (steps or 1)
            assert all(f"{key} {value}" in error.problem for key, value in given.items() if key != keys[0])
            assert f"{train} is not" in error.problem and "8 data-parallel ranks" in error.problem
            assert " 0" not in error.problem
        else:
            assert train % (8 * fields["strategy.microbatch"]) == 0
            assert fields["strategy.microbatch"] == (micro or train // 8 // (steps or 1))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("comment", ["", "# nothing\n"])
def test_a_file_without_settings_is_refused(name: str, comment: str, tmp_path: Path) -> None:
    file = tmp_path / f"empty{TARGETS[name].format.suffixes[0]}"
    file.write_text(comment)
    with pytest.raises(SpecError):
        configuration_in(file, name).read(load("model", Model, "llama3-8b"), NODE)
    found = run("analyze", str(file), "--model", "llama3-8b", "--cluster", "dgx-h100:1", "--global-batch", "8")
    assert found.status == 2 and "Traceback" not in found.err

"""Files of Accelerate and DeepSpeed: every mode by its name, files that name others, batches that do not divide."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from cli.running import run
from shardwise.interop.frameworks import TARGETS, configuration_in, target
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.presets import load

NODE = cluster_from("dgx-h100:1")
# `DistributedType` of Accelerate 1.15.
MODES = ("MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_NEURON", "MULTI_XPU",
         "MULTI_HPU", "DEEPSPEED", "FSDP", "TP", "XLA", "MEGATRON_LM", "NO")  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_read_or_refused_by_name(mode: str) -> None:
    text = f"distributed_type: '{mode}'\nmixed_precision: bf16\n"
    if mode in ("TP", "XLA", "MEGATRON_LM"):
        with pytest.raises(SpecError, match=f"{mode} is a mode that is not read here"):
            target("accelerate").read(text)
        return
    assert target("accelerate").read(text).devices == (1 if mode == "NO" else None)
    if mode == "NO":
        with pytest.raises(SpecError, match="NO is one process, but the cluster has 8 devices; use --gpus 1"):
            target("accelerate").read(text, cluster=NODE)


@pytest.mark.parametrize(("backend", "precision"), [("TE", "fp8-delayed"), ("AO", "fp8"), ("MSAMP", "fp8")])
def test_the_backend_of_fp8_says_how_it_scales(backend: str, precision: str) -> None:
    text = f"distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config:\n  backend: {backend}\n"
    assert target("accelerate").read(text).fields["training.precision"] == precision


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

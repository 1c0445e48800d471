"""Every configuration that TorchTitan and Megatron-LM test themselves: a job, or one line that says why not."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.interop.frameworks import TARGETS, framework_of, read
from shardwise.interop.frameworks.megatron_files import argument_words
from shardwise.spec import SpecError
from shardwise.spec.files import dump_yaml

ROOT = Path(__file__).resolve().parents[3]
MEGATRON = TARGETS["megatron"]
SHAPE = {"--num-layers": 4, "--hidden-size": 64, "--num-attention-heads": 4, "--micro-batch-size": 1}


@cache
def imports() -> ModuleType:
    """`docs/make_imports.py`, which writes the page."""
    spec = importlib.util.spec_from_file_location("make_imports", ROOT / "docs" / "make_imports.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["make_imports"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(arguments: dict[str, Any], script: str = "pretrain_gpt.py") -> str:
    words = (shlex.join([name, *argument_words(value)]) for name, value in arguments.items())
    return " ".join(["torchrun --nproc-per-node 8", script, *words])


@pytest.mark.slow
def test_every_case_is_a_job_or_refused_in_one_line_as_the_page_says() -> None:
    page = (ROOT / "docs" / "imports.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ((?:\w|-)+/[^|]+?) \| (.*) \|$", page, re.MULTILINE))
    found = imports().outcomes()
    assert {one.case.name for one in found} == set(rows) and len(found) == len(rows)
    for one in found:
        if one.job is None:
            assert "\n" not in one.refused and "/tmp" not in one.refused
            assert rows[one.case.name] == imports()._escaped(one.refused)
        else:
            words = f"{one.job.cluster.devices} | {imports().layout(one.job)} | "
            assert rows[one.case.name].startswith(words), one.case.name
    assert sum(one.job is not None for one in found) > 250  # an importer that refuses everything is none


@pytest.mark.slow
def test_a_file_of_the_functional_tests_says_what_its_command_line_says() -> None:
    cases = json.loads((ROOT / "tests/interop/frameworks/published/megatron.json").read_text(encoding="utf-8"))["cases"]
    read_ones = 0
    for name, case in cases.items():
        if not (arguments := case.get("arguments")):
            continue
        files = dump_yaml({"ENV_VARS": {"NCCL_ALGO": "Ring"}, "MODEL_ARGS": arguments}), command(arguments)
        answers = []
        for text in files:
            try:
                answers.append(MEGATRON.read(text))
            except SpecError as error:
                answers.append(str(error))
        assert answers[0] == answers[1], name
        read_ones += not isinstance(answers[0], str)
    assert read_ones > 200


def test_the_file_is_recognised_by_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(dump_yaml({"MODEL_ARGS": {**SHAPE, "--bf16": True, "--swiglu": False}, "TEST_TYPE": "regular"}))
    assert framework_of(path) == "megatron"
    fields = read(path).fields
    assert (fields["model.layers"], fields["model.activation"]) == (4, "gelu")
    assert fields["training.precision"] == "bf16-fp32-grads"


@pytest.mark.parametrize(
    ("mode", "reason"), [("inference", "generates text and trains nothing"), ("rl", "between its steps")]
)
def test_what_is_no_training_is_refused(mode: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        MEGATRON.read(dump_yaml({"MODE": mode, "MODEL_ARGS": SHAPE}))
    assert MEGATRON.read(dump_yaml({"MODE": "pretraining", "MODEL_ARGS": SHAPE})).fields["model.layers"] == 4


@pytest.mark.parametrize("arguments", [None, {}, [1], "--num-layers 4"])
def test_a_file_without_arguments_is_refused(arguments: Any) -> None:
    with pytest.raises(SpecError, match="MODEL_ARGS"):
        MEGATRON.read(dump_yaml({"MODEL_ARGS": arguments}))


@pytest.mark.parametrize("script", ["pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "examples/train_rl.py"])
def test_another_models_script_is_refused_and_named(script: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(command(SHAPE, script))
    assert framework_of(path) == "megatron"  # so that the reason reaches the user
    with pytest.raises(SpecError, match=Path(script).name):
        read(path)
    path.write_text(command(SHAPE, "my_bertha.py"))  # a script of one's own
    assert read(path).fields["model.layers"] == 4


@pytest.mark.parametrize(
    "option", [["--hybrid-override-pattern", "M*"], ["--linear-attention-freq", "3"], ["--decoder-num-layers", "4"]]
)
def test_a_model_that_a_job_does_not_describe_is_refused(option: list[str]) -> None:
    with pytest.raises(SpecError, match=f"{option[0]}: asks for"):
        MEGATRON.read(command(SHAPE) + " " + shlex.join(option))


def test_options_without_effect_do_not_stop_a_dense_model() -> None:
    assert "strategy.expert_tp" not in MEGATRON.read(command({**SHAPE, "--expert-tensor-parallel-size": 4})).fields
    experts = {**SHAPE, "--num-experts": 4, "--expert-tensor-parallel-size": 2, "--tensor-model-parallel-size": 2}
    assert MEGATRON.read(command(experts)).fields["strategy.expert_tp"] == 2


def test_embedding_and_loss_count_as_layers_of_their_stages() -> None:
    split = {f"--account-for-{what}-in-pipeline-split": True for what in ("embedding", "loss")}
    shape = {**SHAPE, "--num-layers": 6, "--pipeline-model-parallel-size": 4}
    assert MEGATRON.read(command({**shape, **split})).fields["strategy.stage_layers"] == (1, 2, 2, 1)
    only_loss = {**SHAPE, "--num-layers": 7, "--pipeline-model-parallel-size": 4, **dict(list(split.items())[1:])}
    assert MEGATRON.read(command(only_loss)).fields["strategy.stage_layers"] == (2, 2, 2, 1)


def test_a_schedule_of_batches_is_priced_at_its_last() -> None:
    found = MEGATRON.read(command({**SHAPE, "--step-batch-size-schedule": "0:384 200B:768"}))
    assert found.fields["training.global_batch"] == 768 and "last batch, 768" in " ".join(found.notes)
    with pytest.raises(SpecError, match="--step-batch-size-schedule"):
        MEGATRON.read(command({**SHAPE, "--step-batch-size-schedule": "often"}))


def test_the_flexible_dispatcher_sends_a_token_once() -> None:
    experts = {**SHAPE, "--num-experts": 4, "--moe-token-dispatcher-type": "flex"}
    assert "strategy.dispatch" not in MEGATRON.read(command(experts)).fields
    backend = {"--moe-flex-dispatcher-backend": "hybridep"}
    assert MEGATRON.read(command({**experts, **backend})).fields["strategy.dispatch"] == "deduplicated"

"""What we write, read by the frameworks' own configuration classes, where they are installed.

They need torch (not a GPU) and the frameworks themselves, so they have an environment of their own:
`make test-frameworks` makes it and runs these.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from interop.frameworks.random_jobs import drawn
from shardwise.interop.frameworks import TARGETS
from shardwise.spec import Job

pytestmark = pytest.mark.frameworks


def own(module: str) -> Any:
    """A module of a framework."""
    return importlib.import_module(module)


def text_of(job: Job, name: str) -> str:
    (text,) = TARGETS[name].export(job).files.values()
    return text


def test_accelerate_reads_its_yaml(tmp_path: Path) -> None:
    config_args = own("accelerate.commands.config.config_args")
    launch = own("accelerate.commands.launch")
    known = {action.dest for action in launch.launch_command_parser()._actions}
    for job in drawn("accelerate", seed=5, number=100):
        path = tmp_path / "accelerate.yaml"
        path.write_text(text_of(job, "accelerate"), encoding="utf-8")
        config = config_args.load_config_from_file(str(path))
        assert config.num_processes == job.cluster.devices
        nested = [*config.fsdp_config, *config.deepspeed_config, *config.parallelism_config]
        assert set(nested) <= known


def test_torchtitan_reads_its_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("torchtitan")
    assert found is not None
    package = ModuleType("torchtitan")  # its configuration without its models, which want more
    package.__path__ = list(found.submodule_search_locations or ())
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    manager = own("torchtitan.config.manager")
    for job in drawn("torchtitan", seed=5, number=20):
        path = tmp_path / "torchtitan.toml"
        path.write_text(text_of(job, "torchtitan"), encoding="utf-8")
        config = manager.ConfigManager().parse_args([f"--job.config_file={path}"])
        strategy, parallelism = job.strategy, config.parallelism
        assert parallelism.tensor_parallel_degree == strategy.tp
        assert parallelism.pipeline_parallel_degree == strategy.pp
        assert parallelism.data_parallel_shard_degree * parallelism.data_parallel_replicate_degree == strategy.dp
        assert config.training.global_batch_size == job.sequences


def test_deepspeed_reads_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = own("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    for job in drawn("deepspeed", seed=5, number=100):
        path = tmp_path / "ds_config.json"
        path.write_text(text_of(job, "deepspeed"), encoding="utf-8")
        strategy = job.strategy
        # As in ``deepspeed.initialize``: only a pipeline has an object that knows its data-parallel ranks.
        monkeypatch.setattr(config.dist, "get_world_size", lambda ranks=job.cluster.devices: ranks)
        mesh = SimpleNamespace(get_data_parallel_world_size=lambda ranks=strategy.data_parallel: ranks)
        read = config.DeepSpeedConfig(json.loads(path.read_text()), mpu=mesh if strategy.pp > 1 else None)
        again = strategy.tp if strategy.pp == 1 else 1
        assert read.train_batch_size == job.sequences * again
        assert read.bfloat16_config.enabled or job.training.precision in ("fp16", "fp32")
        assert read.zero_optimization_stage == job.strategy.zero
        assert read.gradient_accumulation_steps == job.microbatches
        assert read.zero_config.overlap_comm == (job.strategy.overlap.dp if job.strategy.zero else False)


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["test"])

"""A real Lightning `Trainer`: priced before its first step, figures to its logger, strategies read."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from torch.utils.data import DataLoader

from integrations.tiny import CLUSTER, Examples, network
from shardwise.integrations.lightning import ShardwiseMonitor, strategy_layout
from shardwise.integrations.module import NotPriced
from shardwise.interop.jobs import read_job
from shardwise.spec.errors import DoesNotFit


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: Any, number: int) -> Any:
        return self.network(**batch).loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.network(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(folder: Path, **more: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=folder, log_every_n_steps=1, **quiet, **more)


def test_the_run_is_priced_and_its_logger_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor, logger = ShardwiseMonitor(cluster=CLUSTER), CSVLogger(tmp_path)
    watched = trainer(
        tmp_path, callbacks=[monitor], logger=logger, max_steps=6, accumulate_grad_batches=2, val_check_interval=2
    )
    watched.fit(Language(), DataLoader(Examples(), batch_size=4), DataLoader(Examples(4), batch_size=4))
    job = read_job(Path(logger.log_dir) / "shardwise" / "job.yaml")
    assert (job.microbatches, job.sequences, job.training.seq, job.run.steps) == (2, 8, 16, 6)
    assert (job.training.precision, job.training.optimizer) == ("fp32", "adamw")
    with (Path(logger.log_dir) / "metrics.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("shardwise/step_seconds")]
    assert rows and float(rows[-1]["shardwise/predicted_step_seconds"]) > 0
    said = capsys.readouterr().out
    assert "shardwise: llama on 1 × cpu: " in said and "predicted beside measured, 6 steps" in said


def test_a_run_that_does_not_fit_is_stopped(tmp_path: Path) -> None:
    monitor = ShardwiseMonitor(cluster=CLUSTER, model="llama3-8b", seq=512, on_misfit="stop")
    watched = trainer(tmp_path, callbacks=[monitor], logger=False, max_steps=2)
    with pytest.raises(DoesNotFit):
        watched.fit(Language(), DataLoader(Examples(), batch_size=4))
    assert watched.global_step == 0


@pytest.mark.slow
def test_the_other_name_of_the_framework_is_watched_too(tmp_path: Path) -> None:
    class OldLanguage(pytorch_lightning.LightningModule):
        training_step, configure_optimizers = Language.training_step, Language.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.network = network()

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    monitor = ShardwiseMonitor(cluster=CLUSTER)
    pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=tmp_path,
        logger=False,
        max_epochs=1,
        callbacks=[monitor],
        **quiet,
    ).fit(OldLanguage(), DataLoader(Examples(8), batch_size=4))
    assert read_job(tmp_path / "shardwise" / "job.yaml").run.steps == 2


def layout(strategy: Any, precision: str = "bf16-mixed", world: int = 8) -> dict[str, Any]:
    asked = SimpleNamespace(
        strategy=strategy, precision=precision, world_size=world, accumulate_grad_batches=2, log_dir=None
    )
    found = strategy_layout(asked, network(), DataLoader(Examples(), batch_size=4))
    assert (found.microbatch, found.accumulation) == (4, 2)
    return {"framework": found.framework, **found.settings, **found.stack}


def test_strategies_are_read() -> None:
    assert layout(DDPStrategy())["distributed_type"] == "MULTI_GPU"
    sharded = layout(FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", cpu_offload=True))
    assert sharded["fsdp_config.fsdp_sharding_strategy"] == "SHARD_GRAD_OP"
    assert sharded["fsdp_config.fsdp_offload_params"] and sharded["gradient_reduce"] == "bf16"
    hybrid = layout(FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4)))
    assert hybrid["fsdp_config.fsdp_sharding_strategy"] == "FULL_SHARD"
    assert hybrid["parallelism_config.parallelism_config_dp_shard_size"] == 4
    with pytest.raises(NotPriced, match="SomeStrategy is not read"):
        layout(type("SomeStrategy", (), {})())
    with pytest.raises(NotPriced, match="precision: '64-true' is not read"):
        layout(DDPStrategy(), "64-true")


def test_a_deepspeed_strategy_is_read_as_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 4}
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)  # DeepSpeed itself need not be installed
    strategy.config = config
    found = layout(strategy)
    assert (found["framework"], found["zero_optimization.stage"]) == ("deepspeed", 3)
    assert found["gradient_accumulation_steps"] == 2

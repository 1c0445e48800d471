"""A rank of a Hugging Face `Trainer` and of an Accelerate loop, under DDP and FSDP2, and of Lightning under FSDP2.

python -m torch.distributed.run --nproc-per-node 2 trainer_worker.py FOLDER
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as Lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from integrations.sharded_worker import CASES
from integrations.tiny import Examples, network
from shardwise.integrations.accelerate import ShardwiseWatch
from shardwise.integrations.huggingface import ShardwiseCallback
from shardwise.integrations.lightning import ShardwiseMonitor
from shardwise.spec.errors import DoesNotFit

CLUSTER = "laptop:2"


def train_by_trainer(folder: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=7, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1,
    )  # fmt: skip
    callback = ShardwiseCallback(cluster=CLUSTER)
    Trainer(model=network(), args=arguments, train_dataset=Examples(), callbacks=[callback]).train()


class Sharded(LightningModule):
    def configure_model(self) -> None:
        self.network = network()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.network.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.network, mesh=mesh)

    def training_step(self, batch: Any, number: int) -> Any:
        return self.network(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train_sharded(folder: Path) -> None:
    Lightning(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ShardwiseMonitor(cluster=CLUSTER, folder=folder)],
    ).fit(Sharded(), DataLoader(Examples(), batch_size=4))  # fmt: skip


def train_by_accelerate(folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Examples(), batch_size=4))
    with ShardwiseWatch(accelerator, model, optimizer, loader, cluster=CLUSTER, folder=folder, steps=6) as watch:
        for _, batch in zip(range(12), itertools.cycle(loader), strict=False):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            watch.step()
    large = Examples(8, 64)
    try:
        ShardwiseWatch(
            accelerator, model, optimizer, accelerator.prepare(DataLoader(large, batch_size=4)), on_misfit="stop",
            cluster=CLUSTER, described="llama3-8b", seq=512, folder=folder.with_name("stopped"),
        )  # fmt: skip
    except DoesNotFit as error:
        folder.with_name(f"rank-{accelerator.process_index}-stops").write_text(str(error), encoding="utf-8")


if __name__ == "__main__":
    train_by_trainer(Path(sys.argv[1]) / "trainer")
    train_by_accelerate(Path(sys.argv[1]) / "accelerate")
    train_sharded(Path(sys.argv[1]) / "sharded")
    for case in ("fsdp2", "trainer-kept"):
        CASES[case](Path(sys.argv[1]) / case)

"""Mixed precision without sharding, trained on a CPU: tensors are counted and compared with their price."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from engine.workers import fresh_pool
from integrations.tiny import CLUSTER, Examples, network
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.memory.room import allocated_bytes
from shardwise.integrations.accelerate import layout_of
from shardwise.integrations.layout import job_of
from shardwise.integrations.lightning import ShardwiseMonitor
from shardwise.integrations.module import Sequences, module_facts
from shardwise.launch.pool import WorkerPlace
from shardwise.spec.clusters import cluster_from
from shardwise.training.memory import TensorBytes
from tables import table

ROOT = Path(__file__).resolve().parents[2]
ROWS, SEQ, STEPS = 2, 14, 4
SMALL = 0.02  # rotary tables, scales of norms, tokens: nothing of them is priced


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3, "vocab_size": 120}
    return network(**{**sizes, "num_attention_heads": 6, "num_key_value_heads": 3, **changes}).train()


def plain() -> Any:
    model = llama()
    model.config.use_cache = False
    return model


def checkpointed(**changes: Any) -> Any:
    model = llama(**changes)
    model.gradient_checkpointing_enable()
    return model


@table(
    "model",
    [
        llama,  # returns keys and values
        plain,
        lambda: plain().bfloat16(),
        checkpointed,
        # Other moments of a checkpointed step: all copies in the cache, or all gradients beside one layer.
        lambda: checkpointed(vocab_size=700, num_hidden_layers=1),
        lambda: checkpointed(vocab_size=104, hidden_size=60, num_hidden_layers=5),
    ],
)
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_a_loop_of_accelerate_holds_what_is_priced(model: Any) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    layout = layout_of(accelerator.state, module, None, ROWS, 1)
    job, _ = job_of(layout, module_facts(module), Sequences(SEQ, "given"), optimizer, cluster_from(CLUSTER))
    module, optimizer = accelerator.prepare(module, optimizer)
    tokens = torch.randint(100, (ROWS, SEQ))

    def step() -> None:
        accelerator.backward(module(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the states of the optimizer
    states = [one for state in optimizer.state.values() for one in state.values()]
    memory = TensorBytes()
    memory.watch([*module.parameters(), *states, tokens])
    with memory:
        step()
    assert memory.peak == pytest.approx(allocated_bytes(job, peak_memory(job)), rel=SMALL)


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = llama()

    def training_step(self, batch: Any, number: int) -> Any:
        return self.network(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.slow
def test_lightning_holds_the_last_gradients_until_the_loss(tmp_path: Path) -> None:
    """In a new process: tensors of all the process are counted, and other tests leave some."""
    with fresh_pool() as fresh:
        fresh.run(_train_with_lightning, 1, tmp_path)
    found = json.loads((tmp_path / "shardwise.json").read_text(encoding="utf-8"))
    assert found["measured"]["memory_bytes"] == pytest.approx(found["predicted"]["tensor_bytes"], rel=SMALL)


def _train_with_lightning(_: WorkerPlace, folder: Path) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    monitor = ShardwiseMonitor(cluster=CLUSTER, folder=folder)
    Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=STEPS,
        logger=False,
        callbacks=[monitor],
        **quiet,
    ).fit(Language(), DataLoader(Examples(16, SEQ), batch_size=ROWS))


def test_an_h200_has_held_what_is_priced() -> None:
    priced_again = runpy.run_path(str(ROOT / "bench" / "watched.py"))["priced_again"]
    records = json.loads((ROOT / "bench" / "results" / "watched-h200.json").read_text(encoding="utf-8"))["records"]
    for record in records:
        assert record["measured"]["memory_bytes"] == pytest.approx(priced_again(record), rel=0.01), record["case"]

"""A rank of Accelerate loops and Trainers that shard their network, all watched; in one process for all cases.

python -m torch.distributed.run --nproc-per-node 2 sharded_worker.py FOLDER CASE...
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as Lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from integrations.tiny import Examples, network
from shardwise.integrations.accelerate import ShardwiseWatch
from shardwise.integrations.huggingface import ShardwiseCallback
from shardwise.integrations.lightning import ShardwiseMonitor

WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
CLUSTER, STEPS = f"laptop:{WORLD}", 5


def begin(*, shards: bool = True) -> None:
    """A new run in this process.

    Accelerate shards over GPUs only, and asks the kind of its processes whether it may: here it is told that they
    are those of GPUs. Their device stays the CPU, and all that runs is Accelerate's and PyTorch's own.
    """
    for name in [one for one in os.environ if one.startswith(("FSDP_", "ACCELERATE_USE_"))]:
        del os.environ[name]
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # FSDP1 refuses the "cpu:0" that Accelerate would choose
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    state = PartialState(cpu=True)
    if shards:
        state.distributed_type = DistributedType.MULTI_GPU


def note(folder: Path, facts: dict[str, Any]) -> None:
    (folder.with_name(f"{folder.name}-rank-{RANK}.json")).write_text(json.dumps(facts, default=str), encoding="utf-8")


def plugin(version: int, **changes: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT", **changes
    )


def loop(
    folder: Path,
    make_plugin: Callable[[], Any] | None,
    *,
    make: Callable[[], Any] = network,
    shards: bool = True,
    mesh: dict[str, int] | None = None,
    mixed: str = "no",
    each_batch: bool = False,
) -> None:
    begin(shards=shards)
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=make_plugin() if make_plugin else None, mixed_precision=mixed,
        parallelism_config=ParallelismConfig(**mesh) if mesh else None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=each_batch),
    )  # fmt: skip
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Examples(), batch_size=4))
    reduced, losses = False, []
    with ShardwiseWatch(accelerator, model, optimizer, loader, cluster=CLUSTER, folder=folder, steps=STEPS) as watch:
        for _, batch in zip(range(2 * STEPS), itertools.cycle(loader), strict=False):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if not accelerator.sync_gradients:
                    reduced |= any(one.grad is not None for one in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            watch.step()
        priced = watch.watch.priced
    job = None if priced is None else priced.job.to_dict()
    why = watch.watch.why_not
    note(folder, {"job": job, "why": why, "reduced": reduced, "losses": losses, "kind": accelerator.distributed_type})


class Kept(ShardwiseCallback):
    """Keeps what was priced after the run."""

    def on_train_end(self, *given: Any, **more: Any) -> None:
        self.priced, self.why = self.watch.priced, self.watch.why_not  # type: ignore[union-attr]
        super().on_train_end(*given, **more)


def train(folder: Path, *, make: Callable[[], Any] = network, shards: bool = True, **changes: Any) -> None:
    begin(shards=shards)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1, **changes,
    )  # fmt: skip
    if arguments.device.type == "cpu" and shards:  # the arguments have made the state anew
        PartialState().distributed_type = DistributedType.MULTI_GPU
    trainer = Trainer(model=make(), args=arguments, train_dataset=Examples())
    callback = Kept(cluster=CLUSTER).attach(trainer)
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    job = None if callback.priced is None else callback.priced.job.to_dict()
    kind = trainer.accelerator.distributed_type
    note(folder, {"job": job, "why": callback.why, "losses": losses, "kind": kind})


def wrapped() -> Any:
    """FSDP1 by hand, which `prepare` leaves as it is, whatever the plugin says."""
    return FullyShardedDataParallel(
        network(), auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True,
    )  # fmt: skip


def loaded(folder: Path, **sizes: int) -> Any:
    """A network that transformers has split when it loaded it."""
    if RANK == 0:
        network().save_pretrained(folder)
    torch.distributed.barrier()
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))


class Split(LightningModule):
    """Its mesh has tensor-parallel ranks; ``splits``: its weights are split over them."""

    def __init__(self, *, splits: bool) -> None:
        super().__init__()
        self.splits = splits

    def configure_model(self) -> None:
        self.network = network()
        if self.splits:
            plan: dict[str, Any] = {f"*.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
            plan["*.down_proj"] = RowwiseParallel()
            for layer in self.network.model.layers:
                parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Any, number: int) -> Any:
        return self.network(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(folder: Path, *, splits: bool) -> None:
    monitor = ShardwiseMonitor(cluster=CLUSTER, folder=folder)
    trainer = Lightning(
        accelerator="cpu", devices=WORLD, max_steps=STEPS, callbacks=[monitor], logger=False,
        strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=WORLD),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Split(splits=splits), DataLoader(Examples(), batch_size=4))


def stopped(folder: Path) -> None:
    """Every rank ends the run before its first step."""
    begin()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(2))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Examples(), batch_size=4))
    ShardwiseWatch(
        accelerator, model, optimizer, loader, cluster=CLUSTER, described="llama3-70b", seq=4096, folder=folder,
        on_misfit="stop",
    )  # fmt: skip


CASES: dict[str, Callable[[Path], None]] = {
    "fsdp2": lambda at: loop(at, partial(plugin, 2)),
    "fsdp2-each-batch": lambda at: loop(at, partial(plugin, 2), each_batch=True),
    "fsdp2-kept": lambda at: loop(at, partial(plugin, 2, reshard_after_forward=False)),
    "fsdp2-bf16": lambda at: loop(at, partial(plugin, 2), mixed="bf16"),
    "fsdp2-recomputed": lambda at: loop(
        at, partial(plugin, 2, activation_checkpointing=True, activation_checkpointing_offload=True)
    ),
    "fsdp1": lambda at: loop(at, partial(plugin, 1, use_orig_params=True)),
    "fsdp1-zero2": lambda at: loop(
        at,
        partial(plugin, 1, sharding_strategy="SHARD_GRAD_OP", use_orig_params=True, activation_checkpointing=True),
    ),
    "fsdp1-bf16": lambda at: loop(at, partial(plugin, 1, use_orig_params=True), mixed="bf16"),
    "fsdp1-by-hand": lambda at: loop(at, partial(plugin, 1), make=wrapped),
    "plain": lambda at: loop(at, partial(plugin, 2), shards=False),
    "hybrid": lambda at: loop(at, partial(plugin, 2), mesh={"dp_replicate_size": 2, "dp_shard_size": WORLD // 2}),
    "not-split": lambda at: loop(at, partial(plugin, 2), mesh={"dp_shard_size": WORLD // 2, "tp_size": 2}),
    "tp": lambda at: loop(
        at, None, make=partial(loaded, at.with_name("saved"), tp_size=WORLD), mesh={"tp_size": WORLD}
    ),
    "trainer-kept": lambda at: train(
        at, fsdp=True, fsdp_config={"reshard_after_forward": False, "activation_checkpointing": True}
    ),
    "trainer-fsdp1": lambda at: train(
        at, fsdp="shard_grad_op auto_wrap", fsdp_config={"version": 1, "sync_module_states": "false"}
    ),
    "trainer-plain": lambda at: train(at, shards=False),
    "trainer-loaded": lambda at: train(at, make=partial(loaded, at.with_name("saved"), fsdp_size=WORLD)),
    "trainer-tp": lambda at: train(at, make=partial(loaded, at.with_name("saved"), tp_size=2, fsdp_size=WORLD // 2)),
    "lightning-tp": partial(fit, splits=True),
    "lightning-not-split": partial(fit, splits=False),
    "stopped": stopped,
}

if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        CASES[chosen](Path(sys.argv[1]) / chosen)
        gc.collect()  # the memory of the next one is counted

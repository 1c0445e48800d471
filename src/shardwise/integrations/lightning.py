"""A Lightning `Trainer`, watched by a callback: priced before its first step, measured beside the prediction."""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

from torch import nn

from shardwise.integrations.layout import (
    FSDP,
    MESH,
    FrameworkRun,
    Ranks,
    RunLayout,
    deepspeed_layout,
    loaded_split,
    require_split,
)
from shardwise.integrations.tuning import NotPriced
from shardwise.integrations.watch import RunWatch, WatchingCallback
from shardwise.spec.installation import is_installed, require_packages

# Two names of the same framework; the one that the program has imported is used.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
# Lightning's precisions, as what fp32 weights are computed in; for the "true" ones the weights themselves decide.
_MIXED = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16", "bf16-true": "no", "16-true": "no"}
_PLAIN = ("SingleDeviceStrategy", "DDPStrategy")


def _callback_class() -> Any:
    known = [name for name in _NAMES if sys.modules.get(name) is not None]
    known += [name for name in _NAMES if is_installed(name.partition(".")[0])]
    if not known:
        require_packages("shardwise.integrations.lightning", "lightning")
    return importlib.import_module(known[0]).Callback


class ShardwiseMonitor(WatchingCallback, _callback_class()):  # type: ignore[misc]
    """Prices what a Lightning `Trainer` is about to run, and measures it beside the prediction::

        Trainer(callbacks=[ShardwiseMonitor(seq=1024, cluster="dgx-h100:1")], ...)

    It takes the options of `WatchingCallback`. ``seq`` is by default the length of the examples, if all are equally
    long; ``folder`` is ``shardwise`` in the trainer's log folder. Figures go to the trainer's loggers.
    """

    _step = 0
    _between = True  # the next batch begins a step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loader, root = trainer.train_dataloader, trainer.log_dir or trainer.default_root_dir
        self._step, steps = trainer.global_step, trainer.estimated_stepping_batches
        self.watch = RunWatch(
            FrameworkRun(
                framework="Lightning",
                module=pl_module,
                optimizer=trainer.optimizers[0] if len(trainer.optimizers) == 1 else None,
                loader=loader,
                settings=(getattr(pl_module, "hparams", None),),
                layout=lambda: strategy_layout(trainer, pl_module, loader),
                ranks=Ranks.here(trainer.world_size, trainer.strategy.root_device),
                is_main=trainer.is_global_zero,
                folder=self.options.folder_in(root),
                first_step=self._step,
                steps=int(steps) if math.isfinite(steps) else None,
            ),
            self.options,
        )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.watch is not None and self._between:
            self.watch.step_begins()
            self._between = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.watch is None or trainer.global_step == self._step:
            return
        self._step, self._between = trainer.global_step, True
        self.watch.step_ends(self._step)
        # `log_dict` would copy the figures to the device at every step, and wait for them.
        if self._step % trainer.log_every_n_steps == 0 and (figures := self.watch.figures()):
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=self._step)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._interrupted()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._interrupted()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._interrupted()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._interrupted()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._finish(f"{type(exception).__name__}: {exception}")


# -- the layout --------------------------------------------------------------------------------------------------------


def strategy_layout(trainer: Any, module: nn.Module, loader: Any) -> RunLayout:
    """What a Lightning strategy runs, in the words of Accelerate's configuration file, or of DeepSpeed's."""
    strategy, accumulation = trainer.strategy, int(trainer.accumulate_grad_batches)
    names = [base.__name__ for base in type(strategy).__mro__]
    rows = _rows(loader)
    if loaded_split(module) is not None:
        problem = "a network that from_pretrained splits (distributed_config) is not read under Lightning"
        raise NotPriced("model", problem, "split it in configure_model, with a ModelParallelStrategy")
    if "DeepSpeedStrategy" in names:
        return deepspeed_layout(strategy.config, rows, accumulation, {})
    settings = {"mixed_precision": _mixed(str(trainer.precision)), "num_processes": int(trainer.world_size)}
    # Lightning frees the last step's gradients after the forward pass (loops/optimization/automatic.py).
    stack: dict[str, Any] = {"gradients": "replaced"} if getattr(module, "automatic_optimization", True) else {}
    if "FSDPStrategy" in names:
        # Lightning reduces gradients in the format that it computes in (FSDPPrecision.mixed_precision_config).
        stack |= {"gradient_reduce": "bf16"} if settings["mixed_precision"] != "no" else {}
        return RunLayout("accelerate", settings | _first_fsdp(strategy), rows, accumulation, stack)
    if "ModelParallelStrategy" in names:
        settings |= _second_fsdp(strategy, module)
    elif any(name in names for name in _PLAIN):
        settings["distributed_type"] = "MULTI_GPU" if trainer.world_size > 1 else "NO"
    else:
        problem = f"{type(strategy).__name__} is not read"
        raise NotPriced("strategy", problem, "read are ddp, fsdp, deepspeed and ModelParallelStrategy")
    return RunLayout("accelerate", settings, rows, accumulation, stack)


def _mixed(precision: str) -> str:
    if precision not in _MIXED:
        raise NotPriced("precision", f"{precision!r} is not read", f"read are {', '.join(_MIXED)}")
    return _MIXED[precision]


def _first_fsdp(strategy: Any) -> dict[str, Any]:
    chosen = strategy.sharding_strategy
    word = str(getattr(chosen, "name", chosen)).upper()
    settings = {
        "distributed_type": "FSDP",
        FSDP + "version": 1,
        FSDP + "offload_params": bool(getattr(strategy.cpu_offload, "offload_params", strategy.cpu_offload)),
    }
    mesh = strategy.kwargs.get("device_mesh")
    if mesh is not None:  # replicas × shards, instead of whole nodes
        replicas, shards = mesh if isinstance(mesh, tuple) else tuple(mesh.mesh.shape)
        settings |= {MESH + "dp_replicate_size": int(replicas), MESH + "dp_shard_size": int(shards)}
        word = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}.get(word, word)
    return {**settings, FSDP + "sharding_strategy": word.lstrip("_")}


def _second_fsdp(strategy: Any, module: nn.Module) -> dict[str, Any]:
    """Settings of a `ModelParallelStrategy`; what is sharded depends on the module, since the user shards it."""
    mesh = strategy.device_mesh
    data, tensor = int(mesh["data_parallel"].size()), int(mesh["tensor_parallel"].size())
    sharded = any("FSDPModule" in [base.__name__ for base in type(module).__mro__] for module in module.modules())
    if data > 1 and not sharded:
        problem = f"{data} data-parallel ranks, but no module is sharded by fully_shard"
        raise NotPriced("strategy", problem, "shard it in configure_model")
    require_split(module, tensor, "tensor_parallel", "split it in configure_model, by parallelize_module")
    return {
        "distributed_type": "FSDP", FSDP + "version": 2, FSDP + "reshard_after_forward": True,
        MESH + "dp_replicate_size": 1, MESH + "dp_shard_size": data, MESH + "tp_size": tensor, MESH + "cp_size": 1,
    }  # fmt: skip


def _rows(loader: Any) -> int:
    for source in (loader, getattr(loader, "batch_sampler", None)):
        rows = getattr(source, "batch_size", None)
        if isinstance(rows, int):
            return rows
    raise NotPriced("batch", f"{type(loader).__name__} does not say how many rows a batch has", "use a DataLoader")

"""A bare Accelerate loop, watched; and the layout of an `Accelerator`, as its configuration file would say it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import Any, Self

from shardwise.integrations.layout import (
    FSDP,
    MESH,
    SIZES,
    FrameworkRun,
    OnMisfit,
    Ranks,
    RunLayout,
    WatchOptions,
    deepspeed_layout,
    fsdp_precision,
    fsdp_settings,
    loaded_split,
    require_split,
)
from shardwise.integrations.tuning import NotPriced
from shardwise.integrations.watch import RunWatch
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import require_packages

LOGGED_EVERY = 10  # steps


class ShardwiseWatch:
    """Prices the run of an `Accelerator` before its first step, and measures it beside the prediction.

    Every process makes one after `prepare`, and uses it as a context, with a `step()` after every batch::

        with ShardwiseWatch(accelerator, model, optimizer, loader, seq=1024, cluster="dgx-h100:1") as watch:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                watch.step()

    ``steps`` is the number of optimizer steps, if known; ``first_step`` is how many a resumed run has done. The rest is
    as in `WatchOptions`; figures go to the accelerator's trackers.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        loader: Any,
        *,
        seq: int | None = None,
        cluster: Any = None,
        described: Any = None,
        folder: str | PathLike[str] | None = None,
        on_misfit: OnMisfit = "warn",
        steps: int | None = None,
        first_step: int = 0,
    ) -> None:
        require_packages("shardwise.integrations.accelerate", "accelerate")
        options = WatchOptions(seq=seq, cluster=cluster, model=described, folder=folder, on_misfit=on_misfit)
        if not hasattr(accelerator, "sync_gradients"):
            raise SpecError(
                "accelerator", f"{type(accelerator).__name__} is not an Accelerator", "pass the one of the run"
            )
        self.accelerator = accelerator
        self._step = first_step
        accumulation = int(accelerator.gradient_accumulation_steps)
        root = accelerator.project_dir or "."
        self.watch = RunWatch(
            FrameworkRun(
                framework="Accelerate",
                module=model,
                optimizer=optimizer,
                loader=loader,
                settings=(),
                layout=lambda: layout_of(accelerator.state, model, loader, None, accumulation),
                ranks=Ranks.here(accelerator.num_processes, accelerator.device),
                is_main=accelerator.is_main_process,
                folder=options.folder_in(root),
                first_step=first_step,
                steps=steps,
            ),
            options,
        )
        self.watch.step_begins()

    def step(self, loss: float | None = None) -> None:
        """Call after every batch; it counts if gradients were synchronised, that is, if the optimizer made a step."""
        if not self.accelerator.sync_gradients:
            return
        self._step += 1
        self.watch.step_ends(self._step, loss)
        if self._step % LOGGED_EVERY == 0 and (figures := self.watch.figures()):
            self.accelerator.log(figures, step=self._step)
        self.watch.step_begins()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Wraps what is not part of a step: ``with watch.aside(): evaluate()``."""
        self.watch.interrupted()
        try:
            yield
        finally:
            self.watch.resumed()

    def finish(self) -> None:
        """Writes what is left, and prints predicted beside measured."""
        self.watch.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.watch.finish(failed="" if kind is None else f"{kind.__name__}: {error}")


# -- the layout --------------------------------------------------------------------------------------------------------


def layout_of(state: Any, module: Any, loader: Any, rows: int | None, accumulation: int) -> RunLayout:
    """The state of an `Accelerator` in the words of Accelerate's configuration file, or of DeepSpeed's.

    ``rows`` are those of a rank's batch, for loaders that do not say.
    """
    kind = str(getattr(state.distributed_type, "value", state.distributed_type))
    parallelism, split = getattr(state, "parallelism_config", None), loaded_split(module)
    mesh = {name: int(getattr(parallelism, name, None) or 1) for name in SIZES}
    if split is not None:
        mesh |= {"tp_size": split.tp}
    rows = rows_of_a_rank(loader, state.num_processes // (mesh["tp_size"] * mesh["cp_size"] * mesh["sp_size"])) or rows
    stack: dict[str, Any] = {"elementwise": "compiled"} if is_compiled(state) else {}
    if kind == "DEEPSPEED":
        config = dict(state.deepspeed_plugin.deepspeed_config)
        if mesh["sp_size"] > 1:
            config["sequence_parallel_size"] = mesh["sp_size"]
        return deepspeed_layout(config, rows, accumulation, stack)
    mixed, processes = str(state.mixed_precision), int(state.num_processes)
    settings = {"distributed_type": kind, "mixed_precision": mixed, "num_processes": processes}
    if split is not None and kind != "FSDP":
        settings |= split.settings(mixed, processes)
        return RunLayout("accelerate", settings, rows, accumulation, stack)
    if kind == "FSDP":
        settings |= fsdp_settings(state.fsdp_plugin, module)
        settings["mixed_precision"], reduced = fsdp_precision(state.fsdp_plugin, mixed, module)
        stack |= reduced
    if max(mesh.values()) > 1:
        require_split(module, mesh["tp_size"], "tp", _SPLITS)
        if kind != "FSDP":  # tensor parallelism alone: nothing is sharded over the ranks that are left
            settings |= {"distributed_type": "FSDP", FSDP + "version": 2}
        settings |= {MESH + name: mesh[name] for name in SIZES if name != "sp_size"}
        method = getattr(getattr(parallelism, "cp_handler", None), "cp_comm_strategy", None)
        if mesh["cp_size"] > 1 and method:
            settings[MESH + "cp_comm_strategy"] = str(method)
    whole = kind == "FSDP" and not sums_each_batch()
    notes = () if kind == "FSDP" or not asks_for_fsdp() else (_NOT_SHARDED,)
    return RunLayout("accelerate", settings, rows, accumulation, stack, notes, keeps_whole_gradients=whole)


_SPLITS = "load it by from_pretrained(distributed_config=DistributedConfig(tp_size=...))"
_NOT_SHARDED = "FSDP is asked for, but Accelerate does not shard here (it does not on a CPU, nor with one process)"


def asks_for_fsdp() -> bool:
    """Whether FSDP is requested: Accelerate sets this if given a plugin, its launcher if the file says so."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def sums_each_batch() -> bool:
    """Whether gradients are reduced after every microbatch.

    Otherwise FSDP keeps whole gradients until the last one, since `Accelerator.accumulate` and the Trainer forbid it to
    reduce them earlier (`Accelerator.no_sync`).
    """
    from accelerate.state import GradientState

    return bool(GradientState().plugin_kwargs.get("sync_each_batch", False))


def is_compiled(state: Any) -> bool:
    """Whether `prepare` compiles the network; the trainer keeps the uncompiled one."""
    backend = getattr(getattr(state, "dynamo_plugin", None), "backend", None)
    return str(getattr(backend, "value", backend) or "NO").upper() != "NO"


def rows_of_a_rank(loader: Any, data_ranks: int) -> int | None:
    """Rows of a batch that a data-parallel rank gets from a loader prepared by Accelerate; None if unknown."""
    try:
        total = int(loader.total_batch_size)
    except (AttributeError, TypeError):
        return None
    if data_ranks < 1 or total % data_ranks:
        raise NotPriced("batch", f"{total:,} rows are not divided evenly over {data_ranks:,} ranks", "make them equal")
    return total // data_ranks

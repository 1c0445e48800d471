"""A `transformers.Trainer`, watched by a callback: priced before its first step, measured beside the prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from shardwise.integrations.accelerate import layout_of
from shardwise.integrations.layout import FrameworkRun, Ranks, RunLayout
from shardwise.integrations.tuning import NotPriced
from shardwise.integrations.watch import RunWatch, WatchingCallback
from shardwise.spec.installation import require_packages

require_packages("shardwise.integrations.huggingface", "transformers", "accelerate")

from transformers import TrainerCallback  # noqa: E402 (says what is missing first)


class ShardwiseCallback(WatchingCallback, TrainerCallback):  # type: ignore[misc]
    """Prices what a `Trainer` is about to run, and measures it beside the prediction::

        ShardwiseCallback(seq=1024, cluster="dgx-h100:1").attach(trainer)

    `attach` puts it before the trainer's loggers, which then record the figures too. Given as ``callbacks=[...]`` it
    comes after them: figures go to ``trainer_state.json``, the console and the run's own folder.

    It takes the options of `WatchingCallback`. ``seq`` is by default ``max_length`` of the arguments, or the length of
    the examples if all are equally long; ``folder`` is ``shardwise`` in the output folder.
    """

    def attach(self, trainer: Any) -> Self:
        """Adds it to a trainer, before the callbacks that write logs."""
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self._finish("it began again")  # if the trainer started over with a smaller batch
        loader = objects.get("train_dataloader")
        self.watch = RunWatch(
            FrameworkRun(
                framework="Hugging Face Trainer",
                module=objects["model"],
                optimizer=objects.get("optimizer"),
                loader=loader,
                settings=(args,),
                layout=lambda: _layout(args, state, objects["model"], loader),
                ranks=Ranks.here(args.world_size, args.device),
                is_main=state.is_world_process_zero,
                folder=self.options.folder_in(args.output_dir),
                first_step=state.global_step,
                steps=state.max_steps,
            ),
            self.options,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.step_ends(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.watch is None or logs is None or not state.is_world_process_zero:
            return
        if isinstance(loss := logs.get("loss"), (int, float)):
            self.watch.note_loss(float(loss))
        figures = self.watch.figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._interrupted()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._interrupted()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._interrupted()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._finish()


def _layout(args: Any, state: Any, module: Any, loader: Any) -> RunLayout:
    from accelerate.state import AcceleratorState

    if args.n_gpu > 1:
        problem = f"nn.DataParallel over {args.n_gpu} GPUs of one process is not priced"
        raise NotPriced("layout", problem, "start one process per GPU: torchrun --nproc-per-node")
    rows = state.train_batch_size or args.train_batch_size
    layout = layout_of(AcceleratorState(), module, loader, rows, args.gradient_accumulation_steps)
    if getattr(args, "use_liger_kernel", False):
        # What it replaces unless `liger_kernel_config` says otherwise (liger_kernel/transformers/monkey_patch.py).
        kernels = {"loss": "pieces", "norms": "fused", "gated_activation": "fused"}
        note = "Liger's kernels are priced by the memory that they save, their time as that of transformers' kernels"
        layout = replace(layout, stack={**layout.stack, **kernels}, notes=(*layout.notes, note))
    elif getattr(args, "loss_type", None) == "chunked_nll":  # of TRL's SFTConfig
        layout = replace(layout, stack={**layout.stack, "loss": "pieces"})
    return layout

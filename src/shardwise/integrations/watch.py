"""Watches a framework's run: rank 0 times its steps and records them beside the prediction.

The folder is that of a run, so that `status`, `report` and `validate` can read it. No rank waits for another, and no
step for its measurement: times come from events on the device that are read a step later.
"""

from __future__ import annotations

import gc
import json
import statistics
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from shardwise.cost.compute.flops import flops_per_token
from shardwise.integrations.layout import FrameworkRun, OnMisfit, PricedRun, WatchOptions, priced_or_why_not
from shardwise.integrations.module import language_model
from shardwise.launch.resume import write_job
from shardwise.report.console import table
from shardwise.report.page import Page
from shardwise.report.verdict import verdict_of
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.metrics.lines import WARM_UP, MetricLines
from shardwise.run.metrics.recorder import STARTED, EventLog, read_prediction
from shardwise.spec.errors import SpecError
from shardwise.spec.units import counted, readable_bytes, readable_count, readable_seconds
from shardwise.training.loop import Timestamp
from shardwise.training.memory import device_memory, tensors_counted

RECORD = "shardwise.json"
RECENT = 20  # steps whose median is logged
_UNLIKE = 0.01  # share of a step's tokens


class RunWatch:
    """Call `step_begins` and `step_ends` around every step, `interrupted` before anything else, `finish` at the end.

    Only rank 0 measures; the others price the run too, so that all stop if one does.
    """

    def __init__(self, run: FrameworkRun, options: WatchOptions) -> None:
        self.run = run
        self.priced, self.why_not = priced_or_why_not(run, options)
        self._open = ExitStack()
        self._lines: MetricLines | None = None
        self._start: Timestamp | None = None
        self._ended: _EndedStep | None = None  # not yet read
        self._times = _StepTimes()
        self._begun = 0  # steps
        self._counting: ExitStack | None = None
        self._memory_bytes: int | None = None
        self._held_before = device_memory(run.ranks.device).get("memory_bytes", 0)
        self._tokens = _TokenCount(run, self.priced)
        self._predicted: dict[str, float] = {}
        if run.is_main:
            self._begin_record()
            self._say()

    # -- before the first step ------------------------------------------------------------------------------------

    def _begin_record(self) -> None:
        folder = RunFolder(self.run.folder)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            self._open.enter_context(folder.checkpoints.locked())
            if self.priced is not None:
                write_job(self.priced.job, folder)
                self._predicted = read_prediction(folder.path)
                self._lines = MetricLines(folder.path, self.run.first_step)
                EventLog(folder.events).write(STARTED, 0, self.run.framework)
            self._write_record()
        except OSError as error:
            self._open.close()
            problem = f"cannot be written ({error.strerror})"
            raise SpecError(str(folder.path), problem, "give another folder=") from None

    def _say(self) -> None:
        if self.priced is None:
            print(f"shardwise: not priced: {self.why_not}", flush=True)
            return
        verdict, *more = self.priced.lines()
        more.append(f"recorded in {self.run.folder}: shardwise analyze {self.run.folder}/job.yaml")
        Page.of([f"shardwise: {verdict}", *(f"  {line}" for line in more)]).print()

    # -- while it trains ------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Starts the clock; on a CPU the tensors of one step are counted, which is too slow to use its time."""
        if not self.run.is_main:
            return
        if self._start is None:
            self._start = Timestamp(self.run.ranks.device)
        self._begun += 1
        self._count_if_due()

    def step_ends(self, step: int, loss: float | None = None) -> None:
        """``step`` counts optimizer steps from 1."""
        if not self.run.is_main or self._start is None:
            return
        memory = self._memory()
        end = Timestamp(self.run.ranks.device)
        ended = _EndedStep(step, self._start, end, self._tokens.taken(), memory, loss)
        self._read_ended()
        self._start, self._ended = end, ended

    def interrupted(self) -> None:
        """What follows is not part of a step, such as an evaluation or a checkpoint."""
        self._start = None
        self._stop_counting()

    def note_loss(self, loss: float) -> None:
        if self._ended is not None:
            self._ended.loss = loss

    def resumed(self) -> None:
        """Ends what `interrupted` began, if nothing tells when the next step begins."""
        if self.run.is_main and self._start is None:
            self._start = Timestamp(self.run.ranks.device)
            self._count_if_due()

    def figures(self) -> dict[str, float]:
        """Measured and predicted figures for the framework's own loggers; empty in the first steps."""
        if not self._times.usual:
            return {}
        seconds, tokens, memory = self._measured(RECENT)
        named = {
            "step_seconds": seconds,
            "predicted_step_seconds": self._predicted.get("predicted_seconds"),
            "tokens_per_second": tokens,
            "memory_bytes": memory,
            "predicted_memory_bytes": self._predicted.get("predicted_memory_bytes"),
        }
        return {f"shardwise/{name}": float(value) for name, value in named.items() if value is not None}

    def _count_if_due(self) -> None:
        due = self._begun > WARM_UP and self._memory_bytes is None and self._counting is None
        if due and self.run.ranks.device.type == "cpu":
            self._counting = ExitStack()
            self._counter = self._counting.enter_context(tensors_counted())

    def _stop_counting(self) -> bool:
        """Ends counting; whether it was on."""
        if self._counting is None:
            return False
        self._counting.close()
        self._counting = None
        gc.unfreeze()  # counting froze the user's objects
        return True

    def _memory(self) -> dict[str, Any]:
        """This rank's peaks, as far as they are known at the end of a step."""
        if self._stop_counting():
            self._memory_bytes = peak = self._counter.peak
            return {"memory_bytes": peak, "memory_bytes_of_ranks": [peak]}
        peaks = device_memory(self.run.ranks.device)
        if peaks.get("memory_bytes", 0) <= self._held_before:
            return {}  # the peak is older than the run
        self._memory_bytes = peaks["memory_bytes"]
        return dict(peaks)

    def _read_ended(self) -> None:
        """Records the step before the newest, which is done, so that nobody waits for it."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        seconds = ended.read_seconds()
        self._times.add(seconds, ended.tokens, is_usual="memory_bytes_of_ranks" not in ended.memory)
        if self._lines is not None and self.priced is not None:
            tokens = ended.tokens or self.priced.job.tokens_per_step
            job = self.priced.job
            least = flops_per_token(job.model, job.training.seq, tuning=job.training.tuning) * tokens / job.peak_flops
            loss = {} if ended.loss is None else {"loss": ended.loss}
            speed = {"seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": least / seconds}
            self._lines.write({"step": ended.step, **loss, **speed, **ended.memory, **self._predicted})

    # -- at its end -----------------------------------------------------------------------------------------------

    def finish(self, *, failed: str = "") -> None:
        """Writes what is left and prints predicted beside measured; ``failed`` is why the run ended early."""
        self._tokens.close()
        self._stop_counting()
        if not self.run.is_main:
            return
        self._read_ended()
        with suppress(OSError):
            self._write_record()
        if self._lines is not None:
            self._lines.close()
            EventLog(RunFolder(self.run.folder).events).ended(0, int(bool(failed)), why=failed)
            self._lines = None
        self._open.close()
        if not failed and self._times.steps:
            self._page().print()

    def _measured(self, newest: int = 0) -> tuple[float | None, float | None, int | None]:
        """Seconds of a step, tokens a second, and bytes of memory; of the ``newest`` steps, or of all."""
        seconds = self._times.median_seconds(newest)
        known = 0.0 if self.priced is None else self.priced.job.tokens_per_step
        tokens = self._times.tokens_of_a_step or known
        return seconds, tokens / seconds if seconds and tokens else None, self._memory_bytes

    def _page(self) -> Page:
        seconds, tokens, memory = self._measured()
        step, held = (self._predicted.get(f"predicted_{name}") for name in ("seconds", "memory_bytes"))
        speed = None if self.priced is None else self.priced.result.tokens_per_second
        rows = [
            _row("step time", step, seconds, readable_seconds),
            _row("tokens per second", speed, tokens, readable_count),
            _row("memory of rank 0", held, memory, readable_bytes),
        ]
        title = f"shardwise: predicted beside measured, {counted(self._times.steps, 'step')}"
        return Page.of([table(title, ("", "predicted", "measured", "difference"), rows), *self._remarks(seconds)])

    def _remarks(self, seconds: float | None) -> Iterator[str]:
        if self.priced is None:
            yield f"not priced: {self.why_not}"
            return
        if seconds is not None and self._times.usual:
            low, high = self.priced.result.predicted_seconds_low, self.priced.result.predicted_seconds_high
            inside = "inside" if low <= seconds <= high else "outside"
            yield f"the measured step is {inside} the error bar, {readable_seconds(low)} to {readable_seconds(high)}"
        wanted, seen = self.priced.job.tokens_per_step, self._times.tokens_of_a_step
        if seen is not None and abs(seen / wanted - 1) > _UNLIKE:
            rows = f"a step had {seen:,.0f} tokens on average, {wanted:,} were priced"
            yield f"{rows}: seq= is the length of a padded example"
        yield f"shardwise report {self.run.folder}, shardwise validate {self.run.folder}"

    def _write_record(self) -> None:
        """Writes what was predicted and measured so far as a JSON file."""
        seconds, tokens, memory = self._measured()
        record: dict[str, Any] = {
            "framework": self.run.framework,
            "versions": {name: installed for name in _PACKAGES if (installed := _version(name))},
            "processes": self.run.ranks.world,
            "steps": self._times.steps,
            "predicted": None,
            "measured": {"step_seconds": seconds, "tokens_per_second": tokens, "memory_bytes": memory,
                         "tokens_per_step": self._times.tokens_of_a_step},
        }  # fmt: skip
        if self.priced is None:
            record["not_priced"] = self.why_not
        else:
            result = self.priced.result
            record["predicted"] = {
                **vars(verdict_of(result.assessment)),
                "tokens_per_second": result.tokens_per_second,
                "tensor_bytes": self._predicted.get("predicted_memory_bytes"),
                "tokens_per_step": self.priced.job.tokens_per_step,
            }
            record |= {"notes": list(self.priced.notes), "job": self.priced.job.to_dict()}
        text = json.dumps(record, indent=2, default=str) + "\n"
        (self.run.folder / RECORD).write_text(text, encoding="utf-8")


class WatchingCallback:
    """What the callbacks of the frameworks share: the user's options, and the run while it trains.

    ``seq`` is the length of a padded example in tokens; ``cluster`` the machine (default: the GPUs of this one);
    ``model`` describes a network without a Hugging Face config; ``folder`` is where the run is recorded.
    ``on_misfit="stop"`` refuses a run that is not known to fit.
    """

    def __init__(
        self,
        *,
        seq: int | None = None,
        cluster: Any = None,
        model: Any = None,
        folder: str | PathLike[str] | None = None,
        on_misfit: OnMisfit = "warn",
    ) -> None:
        super().__init__()
        self.options = WatchOptions(seq=seq, cluster=cluster, model=model, folder=folder, on_misfit=on_misfit)
        self.watch: RunWatch | None = None

    def _interrupted(self) -> None:
        if self.watch is not None:
            self.watch.interrupted()

    def _finish(self, failed: str = "") -> None:
        if self.watch is not None:
            self.watch.finish(failed=failed)
            self.watch = None


_PACKAGES = ("shardwise", "torch", "transformers", "accelerate", "lightning", "pytorch-lightning", "deepspeed")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _row(name: str, predicted: float | None, measured: float | None, show: Any) -> tuple[str, str, str, str]:
    told = ("–" if value is None else show(value) for value in (predicted, measured))
    apart = f"{measured / predicted - 1:+.0%}" if predicted and measured is not None else "–"
    return (name, *told, apart)  # type: ignore[return-value]


class _EndedStep:
    """A step whose work is launched, and whose time is known once the device is done."""

    def __init__(
        self, step: int, start: Timestamp, end: Timestamp, tokens: int, memory: dict[str, Any], loss: float | None
    ) -> None:
        self.step, self.tokens, self.memory, self.loss = step, tokens, memory, loss
        self._start, self._end = start, end

    def read_seconds(self) -> float:
        self._end.wait()
        return self._end.seconds_since(self._start)


class _StepTimes:
    """How long steps took, without the first few, which take longer, unless there are no others.

    Stored in arrays, since there may be a million.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.usual = array("d")  # seconds
        self._first = array("d")
        self._tokens, self._with_tokens = 0, 0

    def add(self, seconds: float, tokens: int, *, is_usual: bool) -> None:
        self.steps += 1
        (self.usual if is_usual and self.steps > WARM_UP else self._first).append(seconds)
        self._tokens, self._with_tokens = self._tokens + tokens, self._with_tokens + bool(tokens)

    def median_seconds(self, newest: int = 0) -> float | None:
        chosen = self.usual[-newest:] if self.usual else self._first
        return statistics.median(chosen) if chosen else None

    @property
    def tokens_of_a_step(self) -> float | None:
        return self._tokens / self._with_tokens if self._with_tokens else None


class _TokenCount:
    """Tokens of a step on all ranks, extrapolated from the batches of this rank."""

    def __init__(self, run: FrameworkRun, priced: PricedRun | None) -> None:
        self._tokens = 0
        self._hook: Any = None
        strategy = None if priced is None else priced.job.strategy
        self._ranks = run.ranks.world // (1 if strategy is None else strategy.tp * strategy.pp)
        compiled = priced is not None and priced.job.stack.elementwise == "compiled"
        if run.is_main and not compiled:  # a hook would be compiled too
            network = language_model(run.module)
            self._hook = network.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, network: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        # An evaluation; `training` is not a sign: from_pretrained loads models in eval mode.
        if not torch.is_grad_enabled():
            return
        tokens = keywords.get("input_ids")
        if tokens is None:
            tokens = next((argument for argument in arguments if isinstance(argument, Tensor)), None)
        if isinstance(tokens, Tensor) and not tokens.is_floating_point() and tokens.ndim == 2:
            self._tokens += tokens.numel()

    def taken(self) -> int:
        tokens, self._tokens = self._tokens, 0
        return tokens * self._ranks

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

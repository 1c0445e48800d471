"""A user's own network under any strategy, in the user's own loop.

The order is the engine's: stages, tensor, context, experts, recompute, data. What is replaced or cut is replaced in the
module that was given: it *is* the parallel module afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.context import cut_sequence
from shardwise.engine.data import apply_data
from shardwise.engine.engine import StepResult, settings_of
from shardwise.engine.gradient_norm import GradientNorm, clip_factor, scale_gradients
from shardwise.engine.gradients import held, ranks_with_copy, sum_partial
from shardwise.engine.mesh import build_mesh
from shardwise.engine.names import named
from shardwise.engine.optimizer import build_optimizer
from shardwise.engine.own_model.checks import (
    require_described,
    require_matching,
    require_table,
    require_trainable,
    require_world,
)
from shardwise.engine.own_model.cut import Initialise, cut_stages, fill_stages, tie_stages
from shardwise.engine.own_model.inputs import in_microbatches, on_device, rows_of, token_batch, usual_call, usual_count
from shardwise.engine.own_model.jobs import job_for
from shardwise.engine.own_model.passes import Call, Loss, Pass, TokenPass, answer_passes, any_pass, call_stage
from shardwise.engine.own_model.tables import found_layers, supplied_table
from shardwise.engine.own_model.whole import Piece, kept_buffers, second_names, whole_tensors
from shardwise.engine.patterns import Patterns
from shardwise.engine.pipeline import Message, PipelineRunner, schedule_of
from shardwise.engine.precision import LossScaler, Scaling, precision_of
from shardwise.engine.recompute import apply_recompute
from shardwise.engine.reductions import all_reduce_sum
from shardwise.engine.refuse import require_runs
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

Count = Callable[[Any], "Tensor | int"]


def parallelize(
    module: nn.Module,
    job: Job | Strategy,
    *,
    training: Training | None = None,
    patterns: Patterns | None = None,
    loss: Loss | None = None,
    count: Count | None = None,
    call: Call | None = None,
    initialise: Initialise | None = None,
    device: str | torch.device | None = None,
) -> Parallel:
    """The module cut as the job says, its optimizer, and a ``step`` for the user's own loop.

        parallel = shardwise.parallelize(model, job)     # every process, the same model
        for batch in loader:                             # this rank's share of the global batch
            loss = parallel.step(batch).loss

    Every process of the default process group calls this with the same module, whose present values are the first
    weights; ``module`` itself is changed and becomes the parallel module. ``job`` may be a `Strategy`, with its
    ``training`` beside it.

    Data parallelism (replicate, ZeRO-1 to 3, hybrid), precision and recompute work for any module. Tensor, sequence,
    pipeline, context and expert parallelism need a table of ``patterns`` that names the module's parts; Hugging Face's
    Llama, Mistral, Mixtral and Qwen classes have theirs here.

    ``loss(outputs, batch)`` is the SUM over what counts in a microbatch, never a mean; the engine divides by the
    ``count`` of the whole global batch, so that all layouts and accumulations agree. Without it, a network with a table
    takes the cross entropy of its head's logits. ``count(batch)`` counts labels other than -100, or else samples,
    unless given. ``call(forward, batch)`` calls the network, by default with what its forward takes by name.

    A batch is this data-parallel rank's share: whole samples, as many on every rank, equal on the ranks of one replica
    (tp, cp, pp); it is cut into microbatches, and along its sequences, here. For a network with a table: ``input_ids``
    and ``labels`` (or ``shift_labels``) as `transformers` has them, or a `Batch`. For any other: a tensor, a tuple
    (inputs, labels) or a mapping, all with one row per sample.

    ``initialise(name, shape)`` gives the whole first value of each tensor where the module has none (meta device).
    """
    if isinstance(job, Job) and training is not None:
        raise SpecError("training", "is part of the job already", "leave one of them out")
    table = patterns or (supplied_table(module) if call is None else None)
    strategy = job.strategy if isinstance(job, Job) else job
    require_table(module, strategy, table)
    if isinstance(job, Strategy):
        require_described(module, job, patterns)
        job = job_for(module, job, training, dist.get_world_size() if dist.is_initialized() else 1)
    require_world(job.strategy)
    require_runs(job)
    require_trainable(module, job, table is not None, initialise is not None)
    if table is not None:
        require_matching(module, table, job)
    elif loss is None:
        problem = f"is not given, and {type(module).__name__} has no table that names its head"
        raise SpecError("loss", problem, "pass loss=, a function of outputs and batch that returns a sum")
    first = next(module.parameters(), torch.empty(0))
    place = torch.device(device or ("cpu" if first.is_meta else first.device))
    return Parallel(module, job, table, place, loss, count, call or usual_call(module), initialise)


class Parallel:
    """This rank's part of a user's network; also unpacks as ``module, optimizer, step``.

    ``module`` is a list of modules where a pipeline gives this rank several stages.
    """

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        table: Patterns | None,
        device: torch.device,
        loss: Loss | None,
        count: Count | None,
        call: Call,
        initialise: Initialise | None,
    ) -> None:
        self.job, self.table, self.device, self.count = job, table, device, count or usual_count
        self.patterns = table or found_layers(module)
        self.aliases = second_names(module)
        self.mesh = build_mesh(job.strategy, device.type, job.model.key_value_heads)
        precision = precision_of(job.training, device)
        self.scaler = LossScaler(Scaling(), device) if precision.scaled else None
        self.stages = cut_stages(module, job, self.mesh, table)
        self.tied = tie_stages(self.stages, job, self.mesh, self.patterns, self.aliases)
        whole = job.strategy.cp == job.strategy.pp == 1
        for stage in self.stages.values():
            run = any_pass(call, loss, precision.compute) if table is None and loss else None
            answer_passes(stage, run or TokenPass(stage, self.patterns, self.mesh, loss), whole)
        apply_recompute(list(self.stages.values()), job, self.patterns)
        if initialise is None:
            for stage in self.stages.values():
                stage.to(device)
        self.data = apply_data(list(self.stages.values()), self.mesh, precision, patterns=self.patterns)
        if initialise is not None:
            fill_stages(self.stages, initialise, device)
        if self.tied:
            self.tied.follow()
        self.data.start()
        self.parameters = held(self.stages.values())
        self.optimizer = build_optimizer(
            [(one.name, one.parameter) for one in self.parameters],
            job.training,
            settings_of(job.training.optimization),
            masters=self.data.masters,
        )
        self.gradient_norm = GradientNorm([ranks_with_copy(one.part, self.mesh) for one in self.parameters], device)
        self.pipeline = self._pipeline(precision.compute) if job.strategy.pp > 1 else None

    @property
    def module(self) -> nn.Module:
        stages = list(self.stages.values())
        return stages[0] if len(stages) == 1 else nn.ModuleList(stages)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.module, self.optimizer, self.step))

    def step(self, batch: Any) -> StepResult:
        """Forward, backward and update on this rank's share of the global batch; the loss is that of all of it."""
        loss = self.forward_backward(batch)
        return StepResult(loss, self.update())

    def forward_backward(self, batch: Any) -> Tensor:
        """The loss of the global batch; gradients are complete on every rank (times the scale of the loss in fp16)."""
        microbatches, counted = self._microbatches(batch)
        divisor = counted if self.scaler is None else counted / self.scaler.scale
        loss = self._train(microbatches, divisor)
        with named("gradients: last sums"):
            sum_partial(self.parameters, self.mesh)
            if self.tied:
                self.tied.add_gradients()
        return self._over_data(loss * divisor) / counted

    def update(self) -> Tensor:
        """Clips the gradients and moves the weights; the gradients' norm before that."""
        gradients, largest = [one.gradient for one in self.parameters], self.job.training.optimization.clip_norm
        norm, bad, scale = self.gradient_norm(gradients), None, None
        if self.scaler is not None:
            scale = self.scaler.scale.clone()
            norm, bad = norm / scale, (~torch.isfinite(norm)).float()
        if largest is not None:
            scale_gradients(gradients, clip_factor(norm, largest))
        self.optimizer.step(bad=bad, divisor=scale)
        if self.scaler is not None and bad is not None:
            self.scaler.update(bad)
        self.data.after_step()
        self.optimizer.zero_grad()
        return norm

    def share(self, batch: Any) -> Any:
        """This rank's samples of a global batch that every rank has; a loader of one's own may give just these."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        each = rows_of(batch) // self.mesh.size("dp")
        return in_microbatches(batch, each)[self.mesh.rank("dp")]

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """The loss of a global batch, of which this is the rank's share; nothing is learnt."""
        microbatches, counted = self._microbatches(batch)
        if self.pipeline:
            loss = self.pipeline.evaluate(microbatches, counted)
        else:
            (stage,) = self.stages.values()
            loss = torch.stack([stage(Pass(one)).float() / counted for one in microbatches]).sum()
        return self._over_data(loss)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the undivided network on rank 0, one at a time; all ranks have to iterate to the end."""
        pieces: dict[str, Piece] = {}
        for stage in self.stages.values():
            pieces |= kept_buffers(stage)
        for one in self.parameters:
            if one.part.counted:
                pieces[one.name] = one.part, self.data.masters.get(one.parameter, one.parameter)
        yield from whole_tensors(pieces, self.aliases)

    def _microbatches(self, batch: Any) -> tuple[list[Any], Tensor]:
        """What this rank computes, and how much counts in the global batch."""
        rows = self.job.strategy.microbatch
        if self.table is None:
            batch = on_device(batch, self.device)
            counted, number = self.count(batch), rows_of(batch)
            microbatches = in_microbatches(batch, rows)
        else:
            tokens = self._own_tokens(token_batch(batch, self.device))
            counted, number = tokens.counted, tokens.tokens.shape[0]
            microbatches = tokens.microbatches(max(1, number // rows))
        wanted = self.job.microbatches * rows if self.pipeline else number
        if number % rows or number != wanted:
            problem = (
                f"has {number} rows on this rank, which are no {wanted if self.pipeline else f'multiple of {rows}'}"
            )
            raise SpecError("batch", problem, "give every rank its share of training.global_batch")
        total = torch.as_tensor(counted, dtype=torch.float32, device=self.device).clone()
        return microbatches, self._over_data(total)

    def _train(self, microbatches: list[Any], divisor: Tensor) -> Tensor:
        if self.pipeline:
            return self.pipeline.step(microbatches, divisor)
        (stage,) = self.stages.values()
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(microbatches):
            self.data.before_microbatch(last=number == len(microbatches) - 1)
            with named(f"forward {number}"):
                lost = stage(Pass(batch))
            with named(f"backward {number}"):
                loss = lost.float() / divisor
                loss.backward()
            total += loss.detach()
        return total

    def _own_tokens(self, batch: Batch) -> Batch:
        """What context parallelism leaves of every sequence on this rank."""
        rank, size, method = self.mesh.rank("cp"), self.mesh.size("cp"), self.job.strategy.context_method
        return batch.changed(lambda tensor: cut_sequence(tensor, rank, size, method))

    def _over_data(self, number: Tensor) -> Tensor:
        """The sum over all ranks that hold other tokens of the step."""
        for name in ("cp", "dp"):
            if self.mesh.size(name) > 1:
                all_reduce_sum(number, self.mesh.group(name))
        return number

    def _pipeline(self, dtype: torch.dtype) -> PipelineRunner:
        strategy = self.job.strategy
        parts = strategy.cp * (strategy.tp if strategy.sequence_parallel else 1)
        shape = (strategy.microbatch, self.job.training.seq // parts, self.job.model.hidden)
        return PipelineRunner(
            schedule_of(self.job),
            self.stages,
            self.mesh.group("pp"),
            Message(shape, dtype, self.device),
            reduction=self.data,
            tied=self.tied,
            call=call_stage,
        )


def gather_state_dict(parallel: Parallel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The undivided network's state dict on rank 0 and an empty one elsewhere; all ranks call this.

    Tensors come one at a time to rank 0's CPU, in the format of the weights that are trained unless ``dtype`` says
    otherwise. Tied parameters appear under all their names.
    """
    return {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in parallel.whole_tensors()}


__all__ = ["Parallel", "gather_state_dict", "parallelize"]

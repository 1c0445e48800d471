"""A user's own network under any strategy, in the user's own loop; and its undivided tensors afterwards.

The order is the engine's: stages, tensor, context, experts, recompute, data. The given module is changed in place: it
*is* the parallel module afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.data.apply import apply_data
from shardwise.engine.fp8.apply import apply_fp8
from shardwise.engine.mesh import build_mesh
from shardwise.engine.offload.store import MASTER
from shardwise.engine.optim.precision import precision_of
from shardwise.engine.own_model import checks, network
from shardwise.engine.own_model.network import Initialise, cut_stages, fill_stages, tie_stages
from shardwise.engine.own_model.tables import found_layers, job_for, supplied_table
from shardwise.engine.parameters import HeldPart, plain_name
from shardwise.engine.patterns import Patterns
from shardwise.engine.recompute import apply_recompute
from shardwise.engine.refuse import require_runs
from shardwise.engine.torch_private import persistent_buffers
from shardwise.engine.trainer import Trainer
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
    loss: network.Loss | None = None,
    count: Count | None = None,
    call: network.Call | None = None,
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
    Llama, Mistral, Mixtral, Qwen, OLMo, Phi, Gemma, GPT-2 and GPT-NeoX classes have theirs here.

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
    strategy = job.strategy if isinstance(job, Job) else job
    table = patterns or (supplied_table(module) if call is None else None)
    if patterns is None and loss is not None and not checks.is_cut(strategy) and checks.has_dropout(module):
        table = None  # the user's own loss and whole modules: dropout works as their author wants
    checks.require_table(module, strategy, table)
    if isinstance(job, Strategy):
        checks.require_described(module, job)
        job = job_for(module, job, training, dist.get_world_size() if dist.is_initialized() else 1)
    checks.require_world(job.strategy)
    require_runs(job, own_module=True)
    checks.require_trainable(module, job, table is not None, initialise is not None)
    if table is not None:
        checks.require_matching(module, table, job, loss is not None)
    elif loss is None:
        problem = f"is not given, and {type(module).__name__} has no table that names its head"
        raise SpecError("loss", problem, "pass loss=, a function of outputs and batch that returns a sum")
    first = next(module.parameters(), torch.empty(0))
    place = torch.device(device or ("cpu" if first.is_meta else first.device))
    return Parallel(module, job, table, place, loss, count, call or network.usual_call(module), initialise)


class Parallel(Trainer[Any]):
    """This rank's part of a user's network; also unpacks as ``module, optimizer, step``.

    ``module`` is a list of modules where a pipeline gives this rank several stages.
    """

    def __init__(
        self,
        module: nn.Module,
        job: Job,
        table: Patterns | None,
        device: torch.device,
        loss: network.Loss | None,
        count: Count | None,
        call: network.Call,
        initialise: Initialise | None,
    ) -> None:
        self.table, self.count = table, count or network.usual_count
        self.patterns = table or found_layers(module)
        self.aliases = second_names(module)
        mesh = build_mesh(job.strategy, device.type, job.model.key_value_heads)
        precision = precision_of(job.training)
        stages = cut_stages(module, job, mesh, table)
        tied = tie_stages(stages, job, mesh, self.patterns, self.aliases)
        whole = job.strategy.cp == job.strategy.pp == 1
        for stage in stages.values():
            run = network.any_pass(call, loss, precision.compute) if table is None and loss else None
            network.answer_passes(stage, run or network.TokenPass(stage, self.patterns, mesh, loss), whole)
        for stage in stages.values():
            apply_fp8(stage, mesh, self.patterns, precision.scaling)
        apply_recompute(list(stages.values()), job, self.patterns)
        if initialise is None:
            for stage in stages.values():
                stage.to(device)
        data = apply_data(list(stages.values()), mesh, precision, patterns=self.patterns, job=job)
        if initialise is not None:
            fill_stages(stages, initialise, device)
        if tied:
            tied.follow()
        super().__init__(job, device, mesh, stages, tied, data, network.call_stage, self.patterns)

    @property
    def module(self) -> nn.Module:
        stages = list(self.stages.values())
        return stages[0] if len(stages) == 1 else nn.ModuleList(stages)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.module, self.optimizer, self.step))

    def share(self, batch: Any) -> Any:
        """This rank's samples of a global batch that every rank has; a loader may also give just these."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        shares, rank = self.job.strategy.dp_shares or (1,) * self.mesh.size("dp"), self.mesh.rank("dp")
        before, each = sum(shares[:rank]), network.rows_of(batch) // sum(shares)
        return network.some_rows(batch, before * each, (before + shares[rank]) * each)

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the undivided network on rank 0, one at a time; all ranks have to iterate to the end."""
        pieces: dict[str, HeldPiece] = {}
        for stage in self.stages.values():
            pieces |= kept_buffers(stage)
        for held in self.parameters:
            if held.part.counted:
                dtype = self.optimizer.dtype(held.parameter, MASTER)
                pieces[held.name] = HeldPiece(held.part, dtype, partial(self.weight, held))
        yield from whole_tensors(pieces, self.aliases)

    def microbatches(self, batch: Any) -> tuple[list[Any], Tensor]:
        rows = self.job.strategy.microbatch
        if self.table is None:
            batch = network.on_device(batch, self.device)
            number = network.rows_of(batch)
            self.require_rows(number, exactly=False)
            counted = self.count(batch)
            microbatches = [network.some_rows(batch, start, start + rows) for start in range(0, number, rows)]
        else:
            tokens = self.own_tokens(network.token_batch(batch, self.device))
            number = tokens.tokens.shape[0]
            self.require_rows(number, exactly=self.pipeline is not None)
            counted, microbatches = tokens.counted, tokens.microbatches(number // rows)
        return microbatches, torch.as_tensor(counted, dtype=torch.float32, device=self.device).clone()


def gather_state_dict(parallel: Parallel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The undivided network's state dict on rank 0 and an empty one elsewhere; all ranks call this.

    Tensors come one at a time to rank 0's CPU, in the format of the weights that are trained unless ``dtype`` says
    otherwise. Tied parameters appear under all their names.
    """
    return {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in parallel.whole_tensors()}


# -- the undivided network: every tensor put together on rank 0, one at a time ------------------------------


Described = Sequence[dict[str, tuple[HeldPart, torch.dtype]]]  # for every rank, what it holds


@dataclass(frozen=True)
class HeldPiece:
    """A rank's part of a tensor."""

    part: HeldPart
    dtype: torch.dtype
    read: Callable[[], Tensor]  # fetches the part, wherever it is stored


def whole_tensors(pieces: dict[str, HeldPiece], aliases: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the network with its name, on the CPU of rank 0.

    The other ranks get nothing, but have to iterate too. ``pieces`` are this rank's; ``aliases`` are second names of
    the same tensors.
    """
    rank = dist.get_rank()
    described: list[dict[str, tuple[HeldPart, torch.dtype]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(described, {name: (piece.part, piece.dtype) for name, piece in pieces.items()})
    for name in dict.fromkeys(name for names in described for name in names):
        mine = pieces[name].read().detach() if name in pieces else None
        if isinstance(mine, DTensor):
            mine = mine.full_tensor()  # a collective of all ranks that hold a shard
        owners = _owners(name, described)
        if rank == 0:
            whole = _collected(name, owners, described, mine)
            yield name, whole
            yield from ((other, whole) for other, first in aliases.items() if first == name)
        elif rank in owners and mine is not None:
            dist.send(mine.contiguous(), 0)


def _owners(name: str, described: Described) -> list[int]:
    """The first rank that holds each part."""
    owners: dict[object, int] = {}
    for rank, pieces in enumerate(described):
        if name in pieces:
            owners.setdefault(pieces[name][0].cuts, rank)
    return list(owners.values())


def _collected(name: str, owners: Sequence[int], described: Described, mine: Tensor | None) -> Tensor:
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu") if mine is None else mine.device
    first, dtype = described[owners[0]][name]
    whole = torch.empty(first.shape, dtype=dtype)
    for owner in owners:
        part, _ = described[owner][name]
        if owner == 0:
            assert mine is not None
            local = mine
        else:
            local = torch.empty(part.local_shape, dtype=dtype, device=device)
            dist.recv(local, owner)
        part.put(local.cpu(), whole)
    return whole


def kept_buffers(root: nn.Module) -> dict[str, HeldPiece]:
    """Buffers that a state dict holds; they are whole on every rank."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name): HeldPiece(
            HeldPart(tuple(buffer.shape)), buffer.dtype, buffer.detach
        )
        for prefix, module in root.named_modules()
        for name, buffer in persistent_buffers(module).items()
    }


def second_names(module: nn.Module) -> dict[str, str]:
    """Names of tied parameters beyond their first."""
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            others[name] = known
    return others


__all__ = ["Parallel", "gather_state_dict", "parallelize"]

"""A user's network: cut by everything but data parallelism, filled with initial values, and run on a microbatch.

Transformers makes masks from the length of the hidden states, which under sequence and context parallelism are only a
part of the sequence. It makes none for an attention implementation that its mask registry does not know; then the call
says which tokens see each other.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.context.apply import apply_attention, apply_context
from shardwise.engine.experts.apply import cut_experts, exchange_of
from shardwise.engine.experts.rows import NodeOfRank
from shardwise.engine.mesh import Mesh
from shardwise.engine.own_model.tables import is_hugging_face
from shardwise.engine.parameters import fill, held, materialise
from shardwise.engine.patterns import Patterns, change_attribute, matching, replace_module
from shardwise.engine.pipeline.tied import TiedEnds, tie_ends
from shardwise.engine.tensor.apply import CutHead, apply_tensor, cut_loss
from shardwise.engine.torch_private import Dropout, is_view, tree_leaves, tree_map_only
from shardwise.layout.groups import node_of
from shardwise.layout.stages import placement, stage_layers, stages_of_rank
from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.models.loss import IGNORED, cross_entropy_sum
from shardwise.models.moe import TokenExchange
from shardwise.spec.errors import SpecError, nearest_name
from shardwise.spec.job import Job

IMPLEMENTATION = "shardwise"


def route_attention(module: Any, patterns: Patterns) -> None:
    """Makes every attention module of a Hugging Face network call an attribute ``attend``."""
    interface: Any = importlib.import_module("transformers").AttentionInterface
    interface.register(IMPLEMENTATION, _attend)
    module.config._attn_implementation = IMPLEMENTATION
    for _, attention in matching(module, patterns.attention):
        attention.attend = dot_product_attention  # type: ignore[assignment]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    documents: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """From [batch, heads, seq, features] to [batch, seq, heads, features]."""
    arguments = AttentionArguments(module.is_causal, sliding_window, scaling, documents, position_ids, softcap=softcap)
    heads_inside = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return module.attend(*heads_inside, arguments), None


def dropout_of(module: nn.Module) -> float:
    """The largest dropout probability in the network."""
    attention = float(getattr(getattr(module, "config", None), "attention_dropout", 0.0) or 0.0)
    return max([attention, *(dropout.p for dropout in module.modules() if isinstance(dropout, Dropout))])


def spread_experts(root: nn.Module, mesh: Mesh, patterns: Patterns, node_of_rank: NodeOfRank, number: int) -> None:
    """Cuts the stacked experts of every layer and sends tokens to them and back. Every rank of the world calls this.

    An experts module maps (rows, indices of their experts [rows, k], weights [rows, k]) to rows, and has its number
    of experts in ``num_experts``.
    """
    if mesh.strategy.overlap.ep and mesh.size("ep") > 1:
        problem = "networks of others have no shared expert and no chunks to overlap an exchange with"
        raise SpecError("strategy.overlap.ep", problem, "overlap.ep: false")
    exchange = exchange_of(number, mesh, mesh.strategy, node_of_rank)
    for _, experts in matching(root, patterns.experts):
        cut_experts(experts, mesh, patterns.expert_features)
        if exchange is not None:
            _send_through(experts, exchange, number // mesh.size("ep"))


def _send_through(experts: Any, exchange: TokenExchange, here: int) -> None:
    plain = experts.forward
    experts.num_experts = here

    def forward(rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        arrived, counts, handle = exchange.dispatch(rows, indices)
        numbers = torch.arange(here, device=rows.device)
        of_rows = torch.repeat_interleave(numbers, counts, output_size=arrived.shape[0])[:, None]
        results = plain(arrived, of_rows, arrived.new_ones((arrived.shape[0], 1)))
        combined: Tensor = exchange.combine(results, weights, handle)
        return combined.clone() if is_view(combined) else combined  # FSDP warns about views that its modules return

    experts.forward = forward


class PassedBy(nn.Module):
    """Replaces a part that another stage holds (embedding, norm or head) and returns its input.

    ``seen`` is what passed through last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = hidden
        return hidden


class Nothing(nn.Module):
    """Replaces learned positions, which the first stage has added already."""

    def forward(self, positions: Tensor) -> float:
        return 0.0


def twin(module: nn.Module) -> nn.Module:
    """A second network with the same parameters and buffers, from which other parts can be removed."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, shared)


def keep_part(root: nn.Module, patterns: Patterns, layers: range, *, first: bool, last: bool) -> Patterns:
    """Removes what belongs to other stages; returns the table of what is left. Parameters keep their names."""
    container = root.get_submodule(patterns.layers.removesuffix(".*"))
    for number, name in enumerate([name for name, _ in container.named_children()]):
        if number not in layers:
            delattr(container, name)  # not by index, which would give the others new names
    for path in patterns.layer_lists:
        change_attribute(root, path, lambda several: [several[layer] for layer in layers])
    gone: dict[str, type[nn.Module]] = {}
    if not first:
        gone |= {"embedding": PassedBy, "position_embedding": Nothing}
    if not last:
        gone |= {"norm": PassedBy, "head": PassedBy}
    for field, stand_in in gone.items():
        for name, _ in list(matching(root, getattr(patterns, field))):
            replace_module(root, name, stand_in())
    emptied: dict[str, Any] = dict.fromkeys(gone, "")
    return replace(patterns, **emptied)


Initialise = Callable[[str, tuple[int, ...]], Tensor]


def cut_stages(module: nn.Module, job: Job, mesh: Mesh, table: Patterns | None) -> dict[int, nn.Module]:
    """The stages of this rank by number; the first of them is the module itself."""
    if table is None:
        return {0: module}
    if is_hugging_face(module):
        route_attention(module, table)
    layers, last = stage_layers(job), len(stage_layers(job)) - 1
    on_node = partial(node_of, node_devices=job.cluster.node_devices)
    mine = stages_of_rank(job, mesh.pipeline_rank)
    stages = {stage: module if stage == mine[0] else twin(module) for stage in mine}
    for stage, part in stages.items():
        here = table
        if job.strategy.pp > 1:
            here = keep_part(part, table, layers[stage], first=stage == 0, last=stage == last)
        if job.strategy.tp > 1:
            _as_sequences(part, here)
        apply_tensor(part, mesh, here, job.model)
        apply_attention(part, job.training)
        apply_context(part, mesh, job.strategy)
        if job.model.moe is not None:
            spread_experts(part, mesh, here, on_node, job.model.moe.experts)
    return stages


def _as_sequences(root: nn.Module, patterns: Patterns) -> None:
    """Makes one sequence of the rows of tokens in a region: tensor parallelism exchanges parts of sequences."""
    for pattern in patterns.flat:
        for _, region in matching(root, pattern):
            region.register_forward_pre_hook(lambda module, arguments: (arguments[0][None], *arguments[1:]))
            region.register_forward_hook(lambda module, arguments, output: output[0])


def tie_stages(
    stages: Mapping[int, nn.Module], job: Job, mesh: Mesh, patterns: Patterns, second_names: Mapping[str, str]
) -> TiedEnds | None:
    """Ties embedding and head where they are one parameter at the two ends of a pipeline."""
    embedding, head = patterns.embedding, patterns.head
    tied = bool(head) and second_names.get(f"{head}.weight") == f"{embedding}.weight"
    if job.strategy.pp == 1 or not tied:
        return None
    return tie_ends(stages, placement(job), mesh.pipeline, embedding=embedding, readers=(head,))


@torch.no_grad()
def fill_stages(stages: Mapping[int, nn.Module], initialise: Initialise, device: torch.device) -> None:
    """Allocates and fills a network on the meta device, one tensor at a time."""
    for stage in stages.values():
        materialise(stage, device)
        for name, buffer in stage.named_buffers():
            buffer.copy_(initialise(name, tuple(buffer.shape)))
    for parameter in held(stages.values()):
        fill(parameter, lambda name, part: part.of(initialise(name, part.shape).to(device)))


# -- One pass of a microbatch: the user's batch in, one tensor out ---------------------------------


KEYS = ("input_ids", "labels", "shift_labels", "position_ids", "documents", "attention_mask")
LABELS = ("shift_labels", "labels")  # names of the labels in a batch


def token_batch(batch: Batch | Mapping[str, Any], device: torch.device) -> Batch:
    """This rank's sequences, on its device.

    ``labels`` are Hugging Face's: the label of a position is its own token, which the position before predicts;
    ``shift_labels`` are already where they are predicted. An ``attention_mask`` separates padding and text as two
    documents, and what padding would predict does not count. ``position_ids`` that do not go up by one start a new
    document, as in `transformers`.
    """
    if not isinstance(batch, Batch):
        batch = _from_mapping(batch)
    return batch.changed(lambda tensor: tensor.to(device, non_blocking=True))


def _from_mapping(batch: Mapping[str, Any]) -> Batch:
    for name in batch:
        if name not in KEYS:
            raise SpecError(f"batch.{name}", "is not known for a network with a table", nearest_name(name, KEYS))
    if "input_ids" not in batch or not any(name in batch for name in LABELS):
        raise SpecError("batch", "has no input_ids, or no labels", "give both, [sequences, tokens] each")
    labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    documents = batch.get("documents")
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORED)  # padding predicts nothing
    if documents is None and mask is not None:
        documents = mask.long()
    elif documents is None and positions is not None:
        starts = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
        documents = starts.cumsum(-1)
    elif documents is not None and mask is not None:
        documents = 2 * documents + mask.long()
    return Batch.of(batch["input_ids"], labels, positions, documents)


def shifted(labels: Tensor) -> Tensor:
    """Labels moved to the positions that predict them; the last position predicts nothing."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)


def as_mapping(batch: Batch, whole_rows: bool = True) -> dict[str, Tensor]:
    """A token batch as a user's loss sees it: this rank's tokens, with labels where they are predicted.

    With ``whole_rows`` also ``labels`` where the tokens themselves are; the first, which nothing predicts, is -100.
    """
    named = {"input_ids": batch.tokens, "shift_labels": batch.labels, "position_ids": batch.positions}
    if whole_rows:
        none = torch.full_like(batch.labels[:, :1], IGNORED)
        named["labels"] = torch.cat([none, batch.labels[:, :-1]], 1)
    return named if batch.documents is None else {**named, "documents": batch.documents}


def on_device(batch: Any, device: torch.device) -> Any:
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def rows_of(batch: Any) -> int:
    sizes = {tensor.shape[0] for tensor in tree_leaves(batch) if isinstance(tensor, Tensor) and tensor.dim()}
    if len(sizes) != 1:
        listed = ", ".join(str(size) for size in sorted(sizes)) or "none"
        raise SpecError("batch", f"its tensors have different numbers of rows ({listed})", "give one row per sample")
    return int(sizes.pop())


def some_rows(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop] if tensor.dim() else tensor, batch)


def usual_count(batch: Any) -> Tensor:
    """The number of labels that are not -100, if they are integers; else of samples."""
    labels: Any = None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        labels = batch[1]
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels != IGNORED).sum()
    first = next(tensor for tensor in tree_leaves(batch) if isinstance(tensor, Tensor))
    return torch.tensor(rows_of(batch), device=first.device)


def usual_call(module: nn.Module) -> Callable[[Callable[..., Any], Any], Any]:
    """Passes the entries of a mapping that the forward takes by name, without labels; of a tuple its first element."""
    parameters = inspect.signature(module.forward).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())

    def call(forward: Callable[..., Any], batch: Any) -> Any:
        if isinstance(batch, Mapping):
            names = [name for name in batch if name not in LABELS and (takes_all or name in parameters)]
            return forward(**{name: batch[name] for name in names})
        return forward(batch[0] if isinstance(batch, (tuple, list)) else batch)

    return call


Loss = Callable[[Any, Any], Tensor]
Summed = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
Forward = Callable[..., Any]
Call = Callable[[Forward, Any], Any]


@dataclass(frozen=True)
class Pass:
    """A call of a stage with a microbatch."""

    batch: Any
    last: bool = True  # the stage is the last one, where the loss is computed


def call_stage(module: nn.Module, inputs: Tensor, batch: Batch, last: bool) -> Tensor:
    """How a pipeline calls a stage."""
    output: Tensor = module(Pass(batch, last), inputs)
    return output


def answer_passes(root: nn.Module, run: Callable[[Forward, Pass, Tensor | None], Tensor], whole: bool) -> None:
    """Makes ``root`` answer a `Pass` by ``run``, which gets the original ``forward``; other calls go to that directly.

    So data parallelism sees one plain tensor leave the network, whatever its author returns. A network that is not
    ``whole``, but cut along its layers or sequences, cannot be called in any other way.
    """
    plain = root.forward

    @wraps(plain)
    def forward(*arguments: Any, **named: Any) -> Any:
        if arguments and isinstance(arguments[0], Pass):
            return run(plain, *arguments, *([None] if len(arguments) == 1 else []))
        if not whole:
            problem = "a network split by layers or sequences cannot be called directly"
            raise SpecError("strategy", problem, "use step or evaluate")
        return plain(*arguments, **named)

    root.forward = forward


def any_pass(call: Call, loss: Loss, dtype: torch.dtype) -> Callable[[Forward, Pass, Tensor | None], Tensor]:
    """A pass of a network without a table: the user's call, the user's loss."""

    def run(plain: Forward, running: Pass, inputs: Tensor | None) -> Tensor:
        outputs = call(
            lambda *arguments, **named: plain(*_cast(arguments, dtype), **_cast(named, dtype)), running.batch
        )
        return loss(outputs, running.batch)

    return run


class TokenPass:
    """A pass of a network with a table: tokens or hidden states in, hidden states or the summed loss out.

    Without a user's ``loss``, the loss is computed from hidden states where the head is called, so that the full logits
    never exist.
    """

    def __init__(self, root: nn.Module, patterns: Patterns, mesh: Mesh, loss: Loss | None) -> None:
        self.patterns, self.loss, self.whole_rows = patterns, loss, mesh.size("cp") == 1
        self.cap: float | None = getattr(root.config, patterns.logit_cap) if patterns.logit_cap else None
        self.labels: Tensor | None = None
        self.total: Tensor | None = None
        heads = [head for _, head in matching(root, patterns.head)]
        self.ends = [head for head in heads if isinstance(head, PassedBy)]
        for head in heads:
            if loss is None and not isinstance(head, PassedBy):
                self._loss_in(head, mesh)

    def _loss_in(self, head: nn.Module, mesh: Mesh) -> None:
        plain = head.forward
        summed: Summed = partial(cross_entropy_sum, softcap=self.cap)
        if isinstance(head, CutHead):
            place = mesh.rank("tp"), mesh.group("tp"), mesh.strategy.sequence_parallel
            summed = cut_loss(head.slice.vocabulary, *place, self.cap)

        def forward(hidden: Tensor) -> Tensor:
            if self.labels is None:
                logits: Tensor = plain(hidden)
                return logits
            self.total = summed(hidden, head.weight, head.bias, self.labels)  # type: ignore[arg-type]
            return self.total

        head.forward = forward

    def __call__(self, plain: Forward, running: Pass, inputs: Tensor | None) -> Tensor:
        batch, at_loss = running.batch, running.last and self.loss is None
        self.labels = batch.labels if at_loss else None
        try:
            outputs = plain(batch.tokens if inputs is None else inputs, **self._named(batch))
            if running.last and self.loss is not None:
                return self.loss(outputs, as_mapping(batch, self.whole_rows))
            expected = self.total if at_loss else self.ends[0].seen
        finally:
            self.labels = self.total = None
            for end in self.ends:
                end.seen = None
        if self.cap is not None and expected is not None:
            return expected  # the network would cap what the head returns, but the loss has capped the logits already
        return _unchanged(outputs, expected)

    def _named(self, batch: Batch) -> dict[str, Any]:
        named = dict(self.patterns.constants)
        if self.patterns.positions:
            named[self.patterns.positions] = batch.positions
        if batch.documents is not None:
            if not self.patterns.documents:
                raise SpecError("batch", "has documents, but the table names no argument for them", "give documents=")
            named[self.patterns.documents] = batch.documents
        return named


def _unchanged(outputs: Any, expected: Tensor | None) -> Tensor:
    """Refuses a network that changes what its last module has returned: the loss or hidden states."""
    logits: Any = outputs
    if isinstance(outputs, Mapping):
        logits = outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    elif isinstance(outputs, tuple):
        logits = outputs[0]
    if expected is None or logits is not expected:
        problem = "the network changes its head's output (or does not call it)"
        raise SpecError("patterns.head", problem, "name the last module that does, or pass loss=")
    return expected


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Inputs in the format that the network computes in."""
    if dtype == torch.float32:
        return arguments
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, arguments)

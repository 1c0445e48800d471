"""Activation recompute: what the forward pass does not keep is computed again when the backward pass needs it.

PyTorch's selective checkpoint runs a whole layer again, collectives included, and sends every operator through Python.
So outputs of cheap functions are discarded instead (`DiscardedOutputs`): where autograd would save such an output, it
saves the function and its inputs, which are kept anyway. That works for every consumer, whether torch's own or a custom
function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate, count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardwise.engine.fp8.linear  # noqa: F401  (its operators are named below)
from shardwise.engine import torch_private
from shardwise.engine.autograd import SavedView, autocast_now, not_deferring, unpack
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.pieces import compute_in_pieces
from shardwise.engine.torch_private import storage_id, version_of
from shardwise.layout.pieces import computes_mlp_in_pieces
from shardwise.models import kernels
from shardwise.models.layer import Layer
from shardwise.models.mlp import MLP
from shardwise.models.moe import MoELayer
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

Function = Callable[..., Any]


class DiscardedOutputs:
    """The functions of one layer whose outputs are not kept.

    ``discarding`` wraps each of them, ``around`` the layer's forward pass. Any number of passes may be waiting for
    their backward pass; nothing outlives the graph of its own pass.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] | None = None  # by the address of their storage; None outside the layer

    def around(self, forward: Function, compiled: Function | None = None) -> Function:
        """``compiled`` replaces ``forward`` where a layer is compiled whole: the compiler sees none of this."""

        @wraps(forward)
        def forward_discarding(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return (compiled or forward)(*arguments, **named)
            if not torch.is_grad_enabled():
                return forward(*arguments, **named)
            self._outputs = {}
            try:
                with saved_tensors_hooks(self._pack, unpack):
                    return forward(*arguments, **named)
            finally:
                self._outputs = None

        return forward_discarding

    def discarding(self, function: Function) -> Function:
        """``function`` takes tensors, the first of which determines the device, and returns new tensors.

        What runs, and runs again, is the result's attribute ``again``: compiling replaces it.
        """

        @wraps(function)
        def call(*inputs: Any) -> Any:
            outputs = call.again(*inputs)  # type: ignore[attr-defined]
            if self._outputs is not None and not torch.compiler.is_compiling():
                made = outputs if isinstance(outputs, tuple) else (outputs,)
                again = _Call(call.again, inputs, self._pack)  # type: ignore[attr-defined]
                for index, output in enumerate(made):
                    storage = output.untyped_storage()
                    # The weak reference keeps the address from being used again, though not the memory.
                    kept = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._outputs[storage_id(storage)] = _Output(again, index, version_of(output), kept)
            return outputs

        call.again = function  # type: ignore[attr-defined]
        return call

    def _pack(self, tensor: Tensor) -> Tensor | SavedView:
        assert self._outputs is not None
        output = self._outputs.get(storage_id(tensor.untyped_storage()))
        if output is None or output.version != version_of(tensor) or output.call.is_input(tensor):
            return tensor.detach()  # the tensor itself could be an output of the very node that saves it: a cycle
        output.call.users += 1
        return SavedView.of(tensor, partial(output.call.output, output.index))


@dataclass(frozen=True)
class _Output:
    """One output of a call, while its layer's forward pass runs."""

    call: _Call
    index: int
    version: int
    storage: StorageWeakRef


class _Call:
    """One call of a function, repeated for the first user of its outputs and kept until the last one has read them.

    A split backward pass may read the outputs twice: then the function runs once more. An input that is itself a
    discarded output (``pack`` knows) is recomputed first.
    """

    def __init__(self, function: Function, inputs: tuple[Any, ...], pack: Callable[[Tensor], Any]) -> None:
        self.function = function
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        self.inputs = tuple(pack(value) if isinstance(value, Tensor) else value for value in inputs)
        self.storages = {storage_id(tensor.untyped_storage()) for tensor in tensors}
        self.versions = tuple(version_of(value) for value in self.inputs if isinstance(value, Tensor))
        self.autocast = autocast_now(tensors[0].device.type)
        self.users = 0
        self._to_come = 0
        self._outputs: tuple[Tensor, ...] = ()

    def is_input(self, tensor: Tensor) -> bool:
        """Whether the tensor is (part of) an input, so that discarding it would save no memory."""
        return storage_id(tensor.untyped_storage()) in self.storages

    def output(self, index: int) -> Tensor:
        if not self._outputs:
            self._run()
            self._to_come = self.users
        output = self._outputs[index]
        self._to_come -= 1
        if self._to_come <= 0:
            self._outputs = ()
        return output

    def _run(self) -> None:
        if self.versions != tuple(version_of(value) for value in self.inputs if isinstance(value, Tensor)):
            raise RuntimeError("an input of a recomputed function was changed in place before the backward pass")
        with torch.no_grad(), self.autocast():
            outputs = self.function(
                *(unpack(value) if isinstance(value, SavedView) else value for value in self.inputs)
            )
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)


# -- What is recomputed, by the job's strategy -----------------------------------------------------
# Layers run under PyTorch's selective checkpoint. Keeping every second matmul is TorchTitan's default: of a layer's
# seven it keeps query, value and gate, besides the attention output; no backward pass reads the output of the last. In
# a layer that is compiled whole, everything costly is kept explicitly: left alone, the compiler would keep whatever
# matmuls read.


aten: Any = torch.ops.aten
Again = Callable[..., Any]  # torch's checkpoint, with the arguments that all layers share
Keeps = Callable[[int, torch.Size], bool]  # whether to keep a matmul, by its number in the layer and its matrix's shape
_MATMULS = (aten.mm.default, aten.addmm.default)
_FP8_MATMUL = torch.ops.shardwise.fp8_product.default
_CASTS = (torch.ops.shardwise.fp8_cast.default, torch.ops.shardwise.fp8_largest.default)
_COSTLY = (
    torch_private.flash_attention.default,
    torch_private.cpu_flash_attention.default,
    torch_private.efficient_attention.default,
    torch_private.cudnn_attention.default,
    torch_private.grouped_mm_operator,
    aten.topk.default,
    aten.sort.stable,
    aten.index_select.default,  # tokens sent to experts and back
)


def every_second_matmul(layer: nn.Module, again: Again) -> Function:
    """The layer's forward pass, which keeps its input and every second matmul but the last."""
    last = sum(isinstance(part, nn.Linear) for part in layer.modules()) - 1
    return _keeping(layer.forward, again, lambda number, shape: number % 2 == 0 and number < last)


_NAMED_MATMULS = {"up-projection": ("query_up", "key_value_up"), "mlp-up": ("gate", "up")}


def all_but_cheap(layer: nn.Module, again: Again, operators: Sequence[str]) -> Function:
    """The layer's forward pass, recomputing what selective recompute names and everything that is as cheap."""
    names = [name for operator in operators for name in _NAMED_MATMULS.get(operator, ())]
    matmuls = [getattr(part, name, None) for part in layer.modules() for name in names]
    repeated = [torch.Size((part.in_features, part.out_features)) for part in matmuls if isinstance(part, nn.Linear)]
    return _keeping(layer.forward, again, lambda number, shape: shape not in repeated)


def nothing_kept() -> tuple[Any, Any]:
    """Contexts that keep nothing of a layer that is compiled whole, where the compiler would keep what it likes."""
    policy = CheckpointPolicy.MUST_RECOMPUTE
    return create_selective_checkpoint_contexts(lambda *_, **__: policy)  # type: ignore[no-any-return, no-untyped-call]


def _keeping(forward: Function, again: Again, keeps: Keeps) -> Function:
    contexts = partial(_contexts, keeps)

    @wraps(forward)
    def forward_twice(*arguments: Any, **named: Any) -> Any:
        return again(forward, *arguments, context_fn=contexts, **named)

    return forward_twice


def _contexts(keeps: Keeps) -> tuple[Any, Any]:
    matmuls = count(), count()  # in the first pass and, before PyTorch 2.12, in the second

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        # Operators of our own are matmuls, attention (FlashAttention-4, or over ranks), or cheap: casts to FP8.
        kept = operator in _COSTLY or (operator.namespace == "shardwise" and operator not in _CASTS)
        if operator in _MATMULS:
            kept = keeps(next(matmuls[context.is_recompute]), arguments[-1].shape)
        elif operator is _FP8_MATMUL:
            kept = keeps(next(matmuls[context.is_recompute]), arguments[2].T.shape)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]


def apply_recompute(
    stages: nn.Module | Sequence[nn.Module], job: Job, patterns: Patterns, *, random: bool = True
) -> None:
    """Recompute in the layers of a rank: its whole model, or all its stages in the order of the model.

    Modules stay where they are and parameters keep their names: only functions are replaced. ``random``: layers may
    draw random numbers. Then the host resets the generator before it recomputes, and no step can be recorded.
    """
    strategy, again = job.strategy, partial(checkpoint, use_reentrant=False, preserve_rng_state=random)
    parts = [stages] if isinstance(stages, nn.Module) else stages
    layers_of = [[layer for _, layer in matching(part, patterns.layers)] for part in parts]
    if strategy.recompute == "full":
        numbers = recomputed_layers([len(layers) for layers in layers_of], strategy.recompute_layers)
        for layers, number in zip(layers_of, numbers):
            for layer in layers[:number]:
                if computes_mlp_in_pieces(job):
                    compute_in_pieces(layer)
                _recompute_whole(layer, again)
    elif strategy.recompute == "selective":
        _require_possible(job)
        for layers in layers_of:
            for layer in layers:
                _recompute_operators(layer, job, again)


def recomputed_layers(stages: Sequence[int], wanted: int | None) -> list[int]:
    """How many of the first layers of each of a rank's stages are recomputed, ``wanted`` of them in all.

    Stages get a share in proportion to their layers, so that a microbatch takes as much memory on each as is planned;
    the remainder goes to earlier stages, which hold more microbatches.
    """
    if wanted is None:
        return list(stages)
    ends = [0, *accumulate(stages)]
    shared = [-(-min(wanted, ends[-1]) * end // max(1, ends[-1])) for end in ends]
    return [later - earlier for earlier, later in pairwise(shared)]


def _require_possible(job: Job) -> None:
    operators, strategy = job.selective_operators, job.strategy
    for operator, dimension, degree in (
        ("alternate-products", "tensor", strategy.tp),
        ("mlp-up", "tensor", strategy.tp),
        ("attention", "context", strategy.cp),
    ):
        if operator in operators and degree > 1:
            problem = f"{operator} would repeat the communication of {dimension} parallelism"
            raise SpecError("strategy.recompute_operators", problem, "use [norm, activation], or recompute: full")


def _recompute_whole(layer: nn.Module, again: Again) -> None:
    """The layer keeps only its inputs."""
    forward = layer.forward
    mixtures = [part for part in layer.modules() if isinstance(part, MoELayer)]

    @wraps(forward)
    def with_gradients_at_once(*arguments: Any, **named: Any) -> Any:
        with not_deferring():
            return forward(*arguments, **named)

    @wraps(forward)
    def forward_twice(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return again(forward, *arguments, context_fn=nothing_kept, **named)
        if mixtures:
            named["context_fn"] = lambda: (nullcontext(), _loads_kept(mixtures))
        return again(with_gradients_at_once, *arguments, **named)

    layer.forward = forward_twice


@contextmanager
def _loads_kept(mixtures: list[MoELayer]) -> Iterator[None]:
    """Tokens that are routed a second time are not counted again in the loads of the experts."""
    loads = [mixture.load for mixture in mixtures]
    for mixture in mixtures:
        mixture.load = torch.empty_like(mixture.load)
    try:
        yield
    finally:
        for mixture, load in zip(mixtures, loads):
            mixture.load = load


def _recompute_operators(layer: nn.Module, job: Job, again: Again) -> None:
    """Makes the layer discard the outputs of the named functions, in whichever of its modules they are."""
    operators = job.selective_operators
    dense = not any(isinstance(part, MoELayer) for part in layer.modules())
    if "alternate-products" in operators:
        if dense:
            layer.forward = every_second_matmul(layer, again)
        return  # a mixture of experts keeps everything
    compiled: Function | None = all_but_cheap(layer, again, operators)
    if isinstance(layer, Layer) and {*operators} == {"norm", "activation"} and _remakes(layer, job):
        layer.remakes, compiled = True, None
    discarded = DiscardedOutputs()
    for operator in operators:
        functions = list(_FUNCTIONS[operator](layer))
        for module, name in functions:
            function = getattr(module, name)
            if operator == "attention":  # its intermediates may be large: the scores of unfused attention
                setattr(module, name, partial(again, function))
            else:
                setattr(module, name, discarded.discarding(function))
        if not functions and (dense or operator != "mlp-up"):
            problem = f"a {type(layer).__name__} has no {operator} that can be recomputed on its own"
            raise SpecError("strategy.recompute_operators", problem, "leave it out, or use recompute: full")
    layer.forward = discarded.around(layer.forward, compiled)


def _remakes(layer: Layer, job: Job) -> bool:
    """Whether the compiled layer makes norms and activations again inside kernels of its own."""
    on_gpu = job.run_device == "cuda" and kernels.run_on(torch.device("cuda"))
    return on_gpu and job.training.compile and layer.can_remake()


Place = tuple[nn.Module, str]  # an attribute of a module that holds a function


def _norms(layer: nn.Module) -> Iterator[Place]:
    """Norms of the layer itself: their outputs are what its matmuls read. (A prediction module has more around it.)"""
    around = ("token_norm", "hidden_norm", "norm")
    children = (child for name, child in layer.named_children() if name not in around)
    return ((child, "forward") for child in children if "norm" in type(child).__name__.lower())


def _attributes(name: str, layer: nn.Module) -> Iterator[Place]:
    return ((part, name) for part in layer.modules() if callable(getattr(part, name, None)))


_FUNCTIONS: dict[str, Callable[[nn.Module], Iterator[Place]]] = {
    "norm": _norms,
    "activation": partial(_attributes, "activation"),
    "up-projection": partial(_attributes, "expand"),
    "mlp-up": lambda layer: ((part, "project") for part in layer.modules() if isinstance(part, MLP)),
    "attention": partial(_attributes, "attend"),
}

"""FlashAttention-4's operators without a GPU: when they are chosen, their shapes, and that all see through them.

Here a CPU kernel of the same operators stands under them; `test_flash_attention_4_gpu.py` has the real ones.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from engine.recompute_cases import LLAMA, job_of
from shardwise.engine.context.apply import kernel_words
from shardwise.engine.recompute import all_but_cheap
from shardwise.models import flash_attention_4
from shardwise.models.attention import attention_scale, rotation_of
from shardwise.models.dot_product import AttentionArguments, attention_mask, document_bounds, dot_product_attention
from shardwise.models.layer import Layer
from shardwise.models.sinks import with_sinks

CPU = torch.device("cpu")


def inputs(dtype: torch.dtype = torch.float64, seq: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, seq, heads, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


# -- a CPU kernel: scores of all tokens of all rows, of which the bounds leave some -----------------------------------


def scores(query: Tensor, key: Tensor, bounds: Tensor | None, causal: bool, window: int | None, scale: float) -> Tensor:
    """Of tensors [batch, seq, heads, features]; -inf where a query does not see a key."""
    seq = query.shape[1]
    documents = None if bounds is None else torch.searchsorted(bounds, torch.arange(seq), right=True)[None]
    seen = attention_mask(seq, CPU, AttentionArguments(causal, window, scale, documents))
    seen = torch.ones(seq, seq).bool().tril(0 if causal else seq) if seen is None else seen
    repeated = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    return (torch.einsum("bqhd,bkhd->bhqk", query, repeated) * scale).masked_fill(~seen, -torch.inf)


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, bounds: Tensor | None, longest: int, *seen: Any
) -> tuple[Tensor, Tensor]:
    rows = [one if bounds is None else one[None] for one in (query, key, value)]
    found = scores(*rows[:2], bounds, *seen)
    repeated = rows[2].repeat_interleave(query.shape[-2] // value.shape[-2], 2)
    out = torch.einsum("bhqk,bkhd->bqhd", found.softmax(-1), repeated).contiguous()
    log_sum = found.logsumexp(-1).float()
    return with_sinks(*((out, log_sum) if bounds is None else (out[0], log_sum[0])), sinks)


def plain_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, bounds: Tensor | None,
    longest: int, causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = (gradient, query, key, value, out)
    of_out, queries, keys, values, outs = (one if bounds is None else one[None] for one in tensors)
    log_sums = log_sum if bounds is None else log_sum[None]
    shares = (scores(queries, keys, bounds, causal, window, scale) - log_sums[..., None]).exp()
    groups = query.shape[-2] // key.shape[-2]
    of_shares = torch.einsum("bqhd,bkhd->bhqk", of_out, values.repeat_interleave(groups, 2))
    mean = (of_out * outs).sum(-1).transpose(1, 2)[..., None]
    of_scores = shares * (of_shares - mean) * scale
    of_query = torch.einsum("bhqk,bkhd->bqhd", of_scores, keys.repeat_interleave(groups, 2))
    of_key, of_value = (
        torch.einsum("bhqk,bqhd->bkhd", one, by).unflatten(2, (-1, groups)).sum(3)
        for one, by in ((of_scores, queries), (shares, of_out))
    )
    return tuple(one.contiguous() if bounds is None else one[0].contiguous() for one in (of_query, of_key, of_value))


@pytest.fixture(autouse=True, scope="module")
def cpu_kernels() -> None:
    flash_attention_4.forward.register_kernel("cpu", plain_forward)
    flash_attention_4.backward.register_kernel("cpu", plain_backward)


class Calls(TorchDispatchMode):
    """The operators of FlashAttention-4 that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "shardwise":
            self.names.append(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))


# -- when it is chosen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "features", "value_features", "said"),
    [
        (torch.bfloat16, 128, 128, ""),
        (torch.float16, 64, 64, ""),
        (torch.float32, 128, 128, "it needs bf16 or fp16"),
        (torch.bfloat16, 80, 80, "it is not for heads of 80 features for keys and 80 for values"),
        (torch.bfloat16, 128, 64, "it is not for heads of 128 features for keys and 64 for values"),
    ],
)
def test_numbers_and_heads_that_it_takes(dtype: torch.dtype, features: int, value_features: int, said: str) -> None:
    assert flash_attention_4.misfit(dtype, features, value_features) == said


def test_a_cpu_has_pytorchs_attention() -> None:
    assert flash_attention_4.obstacle(CPU) == "it needs a GPU of NVIDIA"
    tensors = [torch.randn(1, 8, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    assert not flash_attention_4.takes(*tensors)
    with Calls() as calls:
        dot_product_attention(*tensors, AttentionArguments(True, None, 0.1)).sum().backward()
    assert calls.names == []


@pytest.mark.parametrize(
    ("installed", "fits"),
    [("4.0.0b36", True), ("4.0.0b37", True), ("4.0.0rc1", True), ("4.0.0", True), ("4.1.0b1", True),
     ("4.0.0b9", False), ("4.0.0a99", False), ("3.9.9", False), ("unknown", False)],
)  # fmt: skip
def test_versions_in_their_order(installed: str, fits: bool) -> None:
    numbers = flash_attention_4._numbers
    assert (numbers(installed) >= numbers(flash_attention_4.OLDEST)) == fits


def test_a_job_says_which_kernel_it_runs() -> None:
    job = job_of(LLAMA)
    assert kernel_words(job, CPU) == "PyTorch's"
    unfused = replace(job, training=replace(job.training, attention="unfused"))
    assert kernel_words(unfused, CPU) == "plain matmuls, scores are stored"
    capped = replace(job, model=replace(LLAMA, numerics=replace(LLAMA.numerics, attention_softcap=30.0)))
    assert "scores are capped" in kernel_words(capped, CPU)
    gpu = torch.device("cuda")  # a format that it has no kernel for needs no GPU to be found out
    assert kernel_words(job, gpu) == "PyTorch's, not FlashAttention-4: it needs bf16 or fp16"


# -- the operators ---------------------------------------------------------------------------------------------------

SEEN = {"causal": (True, None), "all": (False, None), "window": (True, 4), "window both ways": (False, 4)}


def differentiated(attend: Any, *tensors: Tensor) -> list[Tensor]:
    given = [one.detach().clone().requires_grad_() for one in tensors]
    out = attend(*given)
    out.square().sum().backward()
    return [out.detach(), *(one.grad for one in given)]


@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("seen", SEEN)
def test_attention_within_what_a_query_sees(seen: str, packed: bool, sunk: bool) -> None:
    causal, window = SEEN[seen]
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12]) if packed else None
    bounds = None if documents is None else document_bounds(documents, 3)
    sinks = [torch.linspace(-1, 1, 4, dtype=torch.float64)] if sunk else []

    def expected(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return dot_product_attention(query, key, value, AttentionArguments(causal, window, 0.3, documents, sinks=sinks))

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        return flash_attention_4.attention(query, key, value, bounds, sinks, causal=causal, window=window, scale=0.3)

    tolerance = {"rtol": 1e-5, "atol": 1e-6}  # of the log-sum-exp, in fp32
    for one, other in zip(differentiated(attend, *inputs(), *sinks), differentiated(expected, *inputs(), *sinks)):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_pytorch_finds_the_operators_well_made(packed: bool) -> None:
    tensors, bounds = inputs(torch.float32), None
    if packed:
        tensors = [one.detach().flatten(0, 1).requires_grad_() for one in tensors]
        bounds = torch.tensor([0, 12, 24], dtype=torch.int32)
    seen = bounds, 12, True, None, 0.3
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    torch.library.opcheck(flash_attention_4.forward, (*tensors, sinks, *seen))
    given = [one.detach() for one in tensors]
    out, log_sum = flash_attention_4.forward(*given, sinks.detach(), *seen)
    torch.library.opcheck(flash_attention_4.backward, (torch.randn_like(out), *given, out, log_sum, *seen))


def test_shapes_are_known_without_values() -> None:
    query, key, value = (torch.empty(2, 12, heads, 64, device="meta", dtype=torch.bfloat16) for heads in (8, 2, 2))
    out, log_sum = flash_attention_4.forward(query, key, value, None, None, 12, True, None, 0.1)
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert (log_sum.shape, log_sum.dtype) == ((2, 8, 12), torch.float32)
    gradients = flash_attention_4.backward(out, query, key, value, out, log_sum, None, 12, True, None, 0.1)
    assert [one.shape for one in gradients] == [query.shape, key.shape, value.shape]


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    made = Layer(LLAMA, moe=False).double()

    def attend(query: Tensor, key: Tensor, value: Tensor, arguments: AttentionArguments) -> Tensor:
        return flash_attention_4.attention(query, key, value, None, causal=True, window=None, scale=arguments.scale)

    made.attention.attend = attend
    return made


def step(layer: Layer, forward: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, 8, LLAMA.hidden, dtype=torch.float64, generator=generator).requires_grad_()
    arguments = AttentionArguments(True, None, attention_scale(LLAMA))
    layer.zero_grad()
    forward(states, rotation_of(LLAMA, torch.arange(8)[None]), arguments).square().sum().backward()
    return [states.grad, *(one.grad.clone() for one in layer.parameters() if one.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("remakes", [False, True])
def test_a_compiled_layer_has_it_in_one_graph(layer: Layer, remakes: bool) -> None:
    right = step(layer, layer)
    layer.remakes = remakes
    compiled = step(layer, torch.compile(layer, backend="aot_eager", fullgraph=True))
    for one, other in zip(compiled, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_selective_recompute_keeps_its_output(layer: Layer) -> None:
    right = step(layer, layer)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with Calls() as calls:
        found = step(layer, all_but_cheap(layer, again, ("norm", "activation")))
    assert calls.names == ["flash_attention_4", "flash_attention_4_backward"]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_full_recompute_runs_it_twice(layer: Layer) -> None:
    with Calls() as calls:
        step(layer, partial(checkpoint, layer, use_reentrant=False))
    assert calls.names == ["flash_attention_4", "flash_attention_4", "flash_attention_4_backward"]


def test_the_choice_is_compiled_away() -> None:
    """Tensors that it would take, were they on a GPU: the compiler must see which device that is, and no more."""
    tensors = [torch.randn(1, 8, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    arguments = AttentionArguments(True, None, 0.1)
    compiled = torch.compile(dot_product_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors, arguments), dot_product_attention(*tensors, arguments))

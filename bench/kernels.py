"""The optimizer's phase of a step, the loss and attention on one GPU: our kernels beside others, in time and memory.

    PYTHONPATH=src python bench/kernels.py [optimizer] [loss] [attention]

The optimizer's phase is the norm of the gradients, clipping and AdamW on bf16 weights; beside it PyTorch's own
`clip_grad_norm_` and fused AdamW on fp32 weights, with bf16 copies; the same with 8-bit moments of torchao, and
flashoptim on bf16 weights with 8 or 16 more bits and 8-bit moments, where these are installed. The loss goes from
hidden states to all gradients; beside it `F.cross_entropy` of all logits, compiled; `F.linear_cross_entropy`, Liger's
and quack's, where there are any.
Attention is FlashAttention-4, where it is installed, beside PyTorch's backends, in turns.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.engine.optim.one_pass import GradientNorm, clip_divisor
from shardwise.engine.optim.optimizer import LocalOptimizer
from shardwise.models import flash_attention_4
from shardwise.models.dot_product import AttentionArguments, document_bounds, packed_attention
from shardwise.models.loss import cross_entropy_sum
from shardwise.spec.training import Training

DEVICE = "cuda"
VOCABULARY, TOKENS = 128256, 16384
REPEATS, AT_ONCE = 5, 4  # medians of so many times, each of so many calls: the host runs ahead, as in training
# Name, hidden, layers, features of keys, features of the MLP.
MODELS = (("1.5B", 2048, 16, 512, 8192), ("2.8B", 4096, 8, 1024, 14336))
# Tokens, hidden, vocabulary.
# Batch, tokens, heads, heads of keys, features of keys, features of values, and what a query sees.
ATTENTIONS = (
    (2, 8192, 32, 8, 128, 128, "causal"), (2, 8192, 32, 8, 64, 64, "causal"), (4, 4096, 32, 8, 64, 64, "causal"),
    (2, 8192, 32, 8, 128, 128, "documents"), (2, 8192, 32, 8, 128, 128, "window"), (16, 1024, 12, 12, 64, 64, "causal"),
    (2, 8192, 16, 16, 96, 96, "causal"), (2, 4096, 16, 16, 192, 128, "causal"), (2, 4096, 16, 8, 256, 256, "causal"),
)  # fmt: skip
DOCUMENTS, WINDOW = 8, 1024
LOSSES = ((TOKENS, 2048, VOCABULARY), (TOKENS, 4096, VOCABULARY), (8192, 768, 50257))


def main(wanted: list[str]) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if not wanted or "optimizer" in wanted:
        for name, *shape in MODELS:
            for kind in ("adamw", "adamw-bf16-moments", "adam8bit"):
                show(f"optimizer {name} {kind}", *ours(kind, *shape))
            for other, build, dtype in others():
                show(f"optimizer {name} {other}", *theirs(build, dtype, *shape))
    if not wanted or "loss" in wanted:
        for tokens, hidden, vocabulary in LOSSES:
            for name, loss in losses().items():
                show(f"loss {tokens} x {hidden} x {vocabulary} {name}", *of_loss(loss, tokens, hidden, vocabulary))
    if not wanted or "attention" in wanted:
        for one in ATTENTIONS:
            for name, (forward, both, flops) in of_attention(*one).items():
                words = f"attention {one[0]} x {one[1]}, {one[4]} {one[5]}, {one[6]}: {name}"
                rates = f"{flops / forward / 1e12:5.0f} {2 * flops / (both - forward) / 1e12:5.0f} TFLOP/s"
                print(f"{words:62} {1e3 * forward:7.2f} {1e3 * (both - forward):7.2f} ms, {rates}", flush=True)


def show(name: str, seconds: float, peak_bytes: float) -> None:
    print(f"{name:50} {1e3 * seconds:8.2f} ms {peak_bytes / 1e9:8.2f} GB", flush=True)


def median_seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    for _ in range(2):
        call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(AT_ONCE):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / AT_ONCE / 1e3)
    return statistics.median(times)


def shapes(hidden: int, layers: int, keys: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a Llama's parameters."""
    for name in ("embedding", "head"):
        yield f"{name}.weight", (VOCABULARY, hidden)
    wide = {"query": (hidden, hidden), "output": (hidden, hidden), "key": (keys, hidden), "value": (keys, hidden)}
    wide |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
    for layer in range(layers):
        yield from ((f"layers.{layer}.{name}.weight", shape) for name, shape in wide.items())
        yield from ((f"layers.{layer}.{name}_norm.weight", (hidden,)) for name in ("attention", "mlp"))


def ours(kind: Any, *shape: int) -> tuple[float, float]:
    """Seconds of the phase, and bytes of weights, gradients and states."""
    given = {name: nn.Parameter(0.02 * torch.randn(one, device=DEVICE)) for name, one in shapes(*shape)}
    masters = {one: one.detach() for one in given.values()}
    for one in given.values():
        one.data = one.to(torch.bfloat16)
        one.grad = torch.randn_like(one)
    optimizer = LocalOptimizer(given.items(), Training(optimizer=kind), masters=masters)
    del masters
    norm_of = GradientNorm([1] * len(given), DEVICE)

    def phase() -> None:
        norm = norm_of([one.grad for one in given.values()])
        optimizer.step(bad=(~torch.isfinite(norm)).float(), divisor=clip_divisor(norm, 1.0))

    return median_seconds(phase), torch.cuda.memory_allocated()


Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def others() -> Iterator[tuple[str, Build, torch.dtype]]:
    """By name an optimizer, and the format of the weights that it updates."""
    yield "PyTorch", lambda given: torch.optim.AdamW(given, fused=True), torch.float32
    with suppress(ImportError):
        eight_bits = importlib.import_module("torchao.optim").AdamW8bit
        yield "torchao AdamW8bit", eight_bits, torch.float32
    with suppress(ImportError):
        flash = importlib.import_module("flashoptim").FlashAdamW
        for bits in (24, 32):
            yield f"flashoptim, {bits} bits of a weight", partial(flash, master_weight_bits=bits), torch.bfloat16


def theirs(build: Build, dtype: torch.dtype, *shape: int) -> tuple[float, float]:
    given = [nn.Parameter((0.02 * torch.randn(one, device=DEVICE)).to(dtype)) for _, one in shapes(*shape)]
    copies = [one.detach().to(torch.bfloat16) for one in given] if dtype != torch.bfloat16 else []
    for one in given:
        one.grad = torch.randn_like(one)
    optimizer = build(given)

    def phase() -> None:
        nn.utils.clip_grad_norm_(given, 1.0)
        optimizer.step()
        for copy, one in zip(copies, given):
            copy.copy_(one.detach())

    return median_seconds(phase), torch.cuda.memory_allocated()


SummedLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def losses() -> dict[str, SummedLoss]:
    def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    found: dict[str, SummedLoss] = {
        "ours": lambda hidden, weight, labels: cross_entropy_sum(hidden, weight, None, labels),
        "compiled cross_entropy": torch.compile(whole),
    }
    with suppress(ImportError):
        liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        fused = liger.LigerFusedLinearCrossEntropyFunction.apply
        for name, wide in (("Liger", None), ("Liger, fp32 sums", torch.float32)):
            rest = (None, None, -100, 0.0, 0.0, "sum", None, False, wide)
            found[name] = lambda *given, rest=rest: fused(*given, *rest)[0]
    with suppress(ImportError):
        chunked = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        found["quack"] = lambda *given: chunked(*given, reduction="sum")
    linear = getattr(F, "linear_cross_entropy", None)  # from PyTorch 2.13 on
    if linear is not None:
        found["linear_cross_entropy"] = lambda hidden, weight, labels: linear(hidden, weight, labels, reduction="sum")
    return found


def of_loss(loss: SummedLoss, tokens: int, hidden: int, vocabulary: int) -> tuple[float, float]:
    """Seconds of both passes, and bytes that they take at the most beside their inputs."""
    states = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, hidden, device=DEVICE)).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=DEVICE)

    def both() -> None:
        states.grad = weight.grad = None
        (loss(states, weight, labels) / tokens).backward()  # type: ignore[no-untyped-call]

    seconds = median_seconds(both)
    states.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    return seconds, torch.cuda.max_memory_allocated() - before


# -- attention -------------------------------------------------------------------------------------------------------


def attentions(seen: str) -> dict[str, Callable[..., Tensor]]:
    """By name, each of queries, keys, values and `AttentionArguments`."""
    found: dict[str, Callable[..., Tensor]] = {}
    if not flash_attention_4.obstacle(torch.device(DEVICE)):

        def fourth(query: Tensor, key: Tensor, value: Tensor, given: AttentionArguments) -> Tensor:
            tensors = query, key, value, given.bounds
            return flash_attention_4.attention(*tensors, causal=True, window=given.window, scale=given.scale)

        found["FlashAttention-4"] = fourth
    if seen != "causal":

        def second(query: Tensor, key: Tensor, value: Tensor, given: AttentionArguments) -> Tensor:
            ends = torch.arange(0, len(query) + 1, device=DEVICE, dtype=torch.int32) * query.shape[1]
            bounds = ends if given.bounds is None else given.bounds
            return packed_attention(query, key, value, bounds, causal=True, window=given.window, scale=given.scale)

        return {**found, "FlashAttention-2": second}

    def of_pytorch(backend: SDPBackend, *given: Any) -> Tensor:
        query, key, value = (one.transpose(1, 2) for one in given[:3])
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=given[3].scale, enable_gqa=True
            ).transpose(1, 2)

    found["cuDNN"] = partial(of_pytorch, SDPBackend.CUDNN_ATTENTION)
    found["FlashAttention-2"] = partial(of_pytorch, SDPBackend.FLASH_ATTENTION)
    return found


def both_passes(forward: Callable[[], Tensor], inputs: list[Tensor], gradient: Tensor) -> object:
    return torch.autograd.grad(forward(), inputs, gradient)


def of_attention(
    batch: int, seq: int, heads: int, key_heads: int, features: int, value_features: int, seen: str
) -> dict[str, tuple[float, float, float]]:
    """Of each way seconds forward and of both passes, and the FLOPs forward of what the mask leaves."""
    sizes = ((heads, features), (key_heads, features), (key_heads, value_features), (heads, value_features))
    *inputs, gradient = (torch.randn(batch, seq, *one, device=DEVICE, dtype=torch.bfloat16) for one in sizes)
    inputs = [one.requires_grad_() for one in inputs]
    numbers = (torch.arange(seq, device=DEVICE) // (seq // DOCUMENTS)).expand(batch, seq)
    packed, window = seen == "documents", WINDOW if seen == "window" else None
    bounds = document_bounds(numbers, DOCUMENTS) if packed else None
    arguments = AttentionArguments(True, window, features**-0.5, numbers if packed else None, bounds=bounds)
    pairs = seq * seq / 2 / (DOCUMENTS if packed else 1) if window is None else seq * window - window**2 / 2
    flops = 2.0 * batch * heads * pairs * (features + value_features)
    ways: dict[str, list[Callable[[], Any]]] = {}
    for name, attend in attentions(seen).items():
        forward = partial(attend, *inputs, arguments)
        ways[name] = [forward, partial(both_passes, forward, inputs, gradient)]
        try:
            ways[name][1]()
        except (RuntimeError, AssertionError) as error:
            print(f"{name} has no kernel for heads of {features}, {value_features}: {str(error).splitlines()[0]}")
            del ways[name]
    times: dict[str, list[list[float]]] = {name: [[], []] for name in ways}
    for _ in range(REPEATS):
        for name, calls in ways.items():
            for place, call in enumerate(calls):
                times[name][place].append(median_seconds(call, repeats=1))
    return {name: (statistics.median(one), statistics.median(two), flops) for name, (one, two) in times.items()}


if __name__ == "__main__":
    main(sys.argv[1:])

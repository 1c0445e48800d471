"""On a GPU: its kernels against the written-out one, and rings of threads (one GPU has no second rank)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.context.cases import Case, arguments_of, gradients_of, inputs_of
from shardwise.engine.context import across_ranks
from shardwise.engine.context.across_ranks import AcrossRanks
from shardwise.engine.context.blocks import (
    CUDNN,
    EFFICIENT,
    FLASH,
    FLASH_4,
    MATH,
    BackwardInputs,
    BlockKernel,
    Merged,
    Scores,
    hidden_score,
)
from shardwise.engine.context.sequence import cut_sequence
from shardwise.models.dot_product import dot_product_attention
from shardwise.models.flash_attention_4 import misfit, obstacle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROUGH = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
WIDTHS = [(128, 128), (192, 128), (64, 64), (20, 12), (12, 20), (24, 16), (256, 256)]
KERNELS = {
    "flash-bf16": (FLASH, torch.bfloat16),
    "flash-fp16": (FLASH, torch.float16),
    "flash-4-bf16": (FLASH_4, torch.bfloat16),
    "flash-4-fp16": (FLASH_4, torch.float16),
    "cudnn-bf16": (CUDNN, torch.bfloat16),
    "cudnn-fp16": (CUDNN, torch.float16),
    "efficient-fp32": (EFFICIENT, torch.float32),
    "efficient-bf16": (EFFICIENT, torch.bfloat16),
}


def deviation(mine: Tensor, other: Tensor) -> float:
    return float((mine.float() - other.float()).abs().max() / other.float().abs().max())


def check(kernel: BlockKernel, given: list[Tensor], causal: bool, hidden: Tensor | None) -> None:
    """``hidden`` [batch or 1, 1, queries, keys]: pairs that are not seen; the query 3 sees no key then."""
    number = given[0].dtype
    wide = [tensor.float() for tensor in given]
    biases = [
        None
        if hidden is None
        else torch.zeros(hidden.shape, device="cuda", dtype=dtype).masked_fill(hidden, hidden_score(dtype))
        for dtype in (number, torch.float32)
    ]
    scores, exact = (Scores(0.1, causal, bias) for bias in biases)
    query, key, value, gradient = given
    out, log_sum = kernel.forward(query, key, value, scores)
    true_out, true_log_sum = MATH.forward(*wide[:3], exact)
    seen = torch.arange(query.shape[1], device="cuda") != (3 if hidden is not None else -1)
    found = [deviation(out[:, seen], true_out[:, seen]), deviation(log_sum[..., seen], true_log_sum[..., seen])]
    assert (log_sum[..., ~seen] < hidden_score(number) / 2).all()
    merged, merged_log_sum = Merged(true_out, true_log_sum).result(hidden is not None)
    gradients = kernel.backward(BackwardInputs(gradient, query, key, value, merged.to(number), merged_log_sum), scores)
    true = MATH.backward(BackwardInputs(wide[3], *wide[:3], merged, merged_log_sum), exact)
    found += [deviation(mine, other) for mine, other in zip(gradients, true, strict=True)]
    assert max(found) < ROUGH[number] and (gradients[0][:, ~seen] == 0).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_a_kernel_agrees_with_the_written_out_one(name: str, widths: tuple[int, int]) -> None:
    kernel, number = KERNELS[name]
    if kernel is FLASH_4 and (against := misfit(number, *widths) or obstacle(torch.device("cuda"))):
        pytest.skip(against)
    sizes = ((128, 128, True), (128, 128, False), (100, 100, True), (257, 65, False))
    groups = (2,) if kernel is FLASH_4 else (1, 2, 4)  # each kind of which takes it seconds to compile
    for key_heads, (queries, keys, causal) in product(groups, sizes):
        shapes = [
            (queries, 4, widths[0]), (keys, key_heads, widths[0]), (keys, key_heads, widths[1]), (queries, 4, widths[1])
        ]  # fmt: skip
        given = [torch.randn(2, *shape, device="cuda").to(number) for shape in shapes]
        check(kernel, given, causal, None)
        if not causal and kernel not in (FLASH, FLASH_4):
            for batch in (1, 2):
                hidden = torch.rand(batch, 1, queries, keys, device="cuda") < 0.4
                hidden[:, :, 3] = True
                check(kernel, given, False, hidden)


# -- threads as ranks --------------------------------------------------------------------------------


class Threads:
    """A group of threads of one process; each tells the others a tensor and takes theirs."""

    def __init__(self, size: int) -> None:
        self.ranks, self.barrier, self.board = size, threading.Barrier(size, timeout=60), [torch.empty(0)] * size
        self.here = threading.local()

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        rank: int = self.here.rank
        return rank

    def exchanged(self, tensor: Tensor) -> list[Tensor]:
        copy = tensor.clone()
        torch.cuda.synchronize()
        self.board[self.rank()] = copy
        self.barrier.wait()
        everyone = list(self.board)
        self.barrier.wait()
        return everyone

    def send_on(self, operations: list[Any]) -> list[Any]:
        sending, arriving = operations
        arriving.tensor.copy_(self.exchanged(sending.tensor)[(self.rank() - 1) % self.ranks])
        return []

    def gather(self, output: Tensor, given: Tensor, group: Any, async_op: bool = False) -> None:
        output.copy_(torch.cat(self.exchanged(given)))

    def reduce_scatter(self, output: Tensor, given: Tensor, group: Any) -> None:
        mine = [tensor.chunk(self.ranks)[self.rank()].float() for tensor in self.exchanged(given)]
        output.copy_(torch.stack(mine).sum(0))

    def run(self, work: Callable[[int], None]) -> None:
        failures: list[BaseException] = []

        def guarded(rank: int) -> None:
            self.here.rank = rank
            try:
                with torch.no_grad():
                    work(rank)
            except BaseException as error:
                failures.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class Message:
    def __init__(self, operation: Any, tensor: Tensor, **others: Any) -> None:
        self.tensor = tensor


class Whole:
    """Documents that need no gathering."""

    def __init__(self, documents: Tensor | None) -> None:
        self.documents = documents

    def of(self, documents: Tensor | None) -> Tensor | None:
        return self.documents


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["ring", "all-gather"])
def test_attention_across_threads(monkeypatch: pytest.MonkeyPatch, number: torch.dtype, method: str) -> None:
    group = Threads(4)
    monkeypatch.setattr(across_ranks.dist, "batch_isend_irecv", group.send_on)
    monkeypatch.setattr(across_ranks.dist, "P2POp", Message)
    monkeypatch.setattr(across_ranks, "all_gather", group.gather)
    monkeypatch.setattr(across_ranks, "reduce_scatter_sum", group.reduce_scatter)
    windows = [(50, True), (50, False), (200, False)] if method == "all-gather" else []
    masks = [(None, False), (None, True), *windows]
    for (heads, widths), causal, (window, documents) in product(
        (((4, 2), (64, 64)), ((4, 4), (192, 128))), (True, False), masks
    ):
        case = Case(method, causal, 2, 512, *heads, *widths, window=window, documents=documents, dtype=number)
        assert max(across_threads(group, case)) < ROUGH[number], case


def across_threads(group: Threads, case: Case) -> list[float]:
    """Of each thread, the worst deviation of output and gradients."""
    size, method = group.size(), case.method
    tensors, arguments = [tensor.cuda() for tensor in inputs_of(case)], arguments_of(case)
    if arguments.documents is not None:
        object.__setattr__(arguments, "documents", arguments.documents.cuda())
    expected = gradients_of(dot_product_attention, tuple(tensor.float() for tensor in tensors), arguments)
    attention = {"ring": across_ranks.RingAttention, "all-gather": across_ranks.GatheredAttention}[method]
    found = [0.0] * size

    def work(rank: int) -> None:
        across = AcrossRanks(attention, group, Whole(arguments.documents))  # type: ignore[arg-type]
        call = across.call(case.seq // size, arguments)
        query, key, value, gradient = (cut_sequence(tensor, rank, size, method) for tensor in tensors)
        out, log_sum = call.forward(query, key, value)
        results = out, *call.backward(BackwardInputs(gradient, query, key, value, out, log_sum))
        found[rank] = max(
            float((mine.float() - cut_sequence(whole, rank, size, method)).abs().max() / whole.abs().max())
            for mine, whole in zip(results, expected, strict=True)
        )

    group.run(work)
    return found

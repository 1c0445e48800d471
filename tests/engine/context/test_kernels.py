"""The block kernels and their merging, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.engine.context import blocks
from shardwise.engine.context.blocks import (
    CPU_FLASH,
    MATH,
    BackwardInputs,
    BlockKernel,
    Merged,
    Scores,
    Seen,
    attention_block,
    attention_block_backward,
    kernel_for,
)
from shardwise.models.dot_product import AttentionArguments, dot_product_attention, shapes_taken

SCALE = 0.3


def tensors(queries: int, keys: int, key_width: int = 16, value_width: int = 16, batch: int = 2) -> tuple[Tensor, ...]:
    """Query, key, value, gradient of the output."""
    random = torch.Generator().manual_seed(5)
    shapes = [(queries, 4, key_width), (keys, 2, key_width), (keys, 2, value_width), (queries, 4, value_width)]
    return tuple(torch.randn(batch, *shape, generator=random) for shape in shapes)


def in_blocks(kernel: BlockKernel, cuts: list[int], given: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients, the keys taken in blocks that end at ``cuts``."""
    query, key, value, gradient = given
    runs = [slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, key.shape[1]], strict=True)]
    merged = Merged.nothing(query, value)
    for run in runs:
        merged.add(*kernel.forward(query, key[:, run], value[:, run], Scores(SCALE)))
    out, log_sum = merged.result()
    saved = BackwardInputs(gradient, query, key, value, out, log_sum)
    shares = [kernel.backward(saved.block(slice(None), key[:, run], value[:, run]), Scores(SCALE)) for run in runs]
    of_query, of_key, of_value = zip(*shares, strict=True)
    return [out, torch.stack(of_query).sum(0), torch.cat(of_key, 1), torch.cat(of_value, 1)]


@pytest.mark.parametrize("kernel", [MATH, CPU_FLASH], ids=["math", "flash"])
@pytest.mark.parametrize("widths", [(16, 16), (20, 12), (12, 20)])
def test_merged_blocks_are_attention_to_all_keys(kernel: BlockKernel, widths: tuple[int, int]) -> None:
    query, key, value, gradient = tensors(12, 12, *widths)
    inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    expected = dot_product_attention(*inputs, AttentionArguments(False, None, SCALE))
    expected.backward(gradient)
    wanted = [expected, *(tensor.grad for tensor in inputs)]
    for cuts in ([], [4], [1, 5, 6]):
        for mine, theirs in zip(in_blocks(kernel, cuts, (query, key, value, gradient)), wanted, strict=True):
            assert theirs is not None
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
def test_the_fused_kernel_agrees_with_the_written_out_one(number: torch.dtype, causal: bool) -> None:
    query, key, value, gradient = (tensor.to(number) for tensor in tensors(12, 12))
    scores = Scores(SCALE, causal)
    (out, log_sum), (other_out, other_log_sum) = (
        kernel.forward(query, key, value, scores) for kernel in (MATH, CPU_FLASH)
    )
    rough = {torch.bfloat16: 3e-2, torch.float16: 4e-3}.get(number, 3e-6)
    torch.testing.assert_close(other_out, out, rtol=0, atol=rough)
    torch.testing.assert_close(other_log_sum, log_sum, rtol=0, atol=rough)
    assert log_sum.dtype == torch.promote_types(number, torch.float32)
    saved = BackwardInputs(gradient, query, key, value, out, log_sum)
    pair = [kernel.backward(saved, scores) for kernel in (MATH, CPU_FLASH)]
    for mine, other in zip(*pair, strict=True):
        torch.testing.assert_close(other, mine, rtol=0, atol=4 * rough)


def test_numbers_that_no_fused_kernel_takes_are_written_out() -> None:
    on_cpu, elsewhere = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8, device="meta")
    assert kernel_for(on_cpu, on_cpu, False) is CPU_FLASH
    assert kernel_for(elsewhere, elsewhere, False) is MATH


# -- rows without keys -------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [MATH, CPU_FLASH], ids=["math", "flash"])
@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16, torch.float16])
def test_a_query_that_sees_no_key_gets_zeros_and_gives_no_gradient(kernel: BlockKernel, number: torch.dtype) -> None:
    query, key, value, gradient = (tensor.to(number) for tensor in tensors(6, 6))
    documents = torch.tensor([[0, 0, 1, 1, 2, 2]] * 2)
    others = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)  # nothing for the last two
    seen = Seen(False, query_documents=documents, key_documents=others)
    merged = Merged.nothing(query, value)
    merged.add(*attention_block(query, key, value, Scores(SCALE), seen, lambda *_: kernel))
    out, log_sum = merged.result(some_rows_empty=True)
    assert out.isfinite().all() and (out[:, 4:] == 0).all() and (out[:, :4] != 0).any(-1).all()
    saved = BackwardInputs(gradient, query, key, value, out, log_sum)
    gradients = attention_block_backward(saved, Scores(SCALE), seen, lambda *_: kernel)
    assert all(tensor.isfinite().all() for tensor in gradients)
    assert (gradients[0][:, 4:] == 0).all() and (gradients[0][:, :4] != 0).any(-1).all()


@pytest.mark.parametrize("kernel", [MATH, CPU_FLASH], ids=["math", "flash"])
def test_a_block_of_which_a_query_sees_nothing_weighs_nothing(kernel: BlockKernel) -> None:
    query, key, value, _ = tensors(4, 8)
    first = kernel.forward(query, key[:, :4], value[:, :4], Scores(SCALE))
    nothing = Seen(False, query_documents=torch.zeros(2, 4), key_documents=torch.ones(2, 4))
    hidden = attention_block(query, key[:, 4:], value[:, 4:], Scores(SCALE), nothing, lambda *_: kernel)
    for order in ((first, hidden), (hidden, first)):
        merged = Merged.nothing(query, value)
        for out, log_sum in order:
            merged.add(out.clone(), log_sum.clone())
        out, log_sum = merged.result(some_rows_empty=True)
        assert torch.equal(out, first[0]) and torch.equal(log_sum, first[1])


# -- pieces ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_taken_in_pieces_are_those_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, window: int | None, causal: bool
) -> None:
    query, key, value, gradient = tensors(8, 20)
    documents = (torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) < 0.2).cumsum(1)
    seen = Seen(causal, window, 9, 0, documents[:, 9:17], documents)

    def both() -> list[Tensor]:
        out, log_sum = attention_block(query, key, value, Scores(SCALE), seen)
        saved = BackwardInputs(gradient, query, key, value, out, log_sum)
        return [out, *attention_block_backward(saved, Scores(SCALE), seen)]

    at_once = both()
    monkeypatch.setattr(blocks, "SHORTEST_PIECE", 3)
    monkeypatch.setattr(blocks, "MASK_ELEMENTS", 1)
    runs = [queries for queries, _, _ in seen.pieces(query, key)]
    assert [(run.start, run.stop) for run in runs][:2] == [(0, 3), (3, 6)]
    for mine, theirs in zip(both(), at_once, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("first_query", "first_key", "keys"), [(0, 0, 12), (20, 11, 21), (20, 11, 26), (3, 0, 15)])
def test_a_window_kernel_sees_what_the_mask_shows(
    monkeypatch: pytest.MonkeyPatch, causal: bool, first_query: int, first_key: int, keys: int
) -> None:
    """The kernel takes the last key for the last query's own."""
    monkeypatch.setattr(blocks, "takes", shapes_taken)
    query, key, value, _ = (tensor.bfloat16() for tensor in tensors(12, keys))
    seen = Seen(causal, 10, first_query, first_key)
    kernel = seen.window_kernel(query, key, value)
    if causal and first_key + keys > first_query + 12:
        assert kernel is None  # keys that nobody sees stand behind
        return
    assert kernel is not None
    places = torch.arange(keys - 12, keys)[:, None] - torch.arange(keys)
    band = (places <= kernel.before) & (places >= -kernel.behind)
    bias = seen._bias(0, 12, slice(0, keys), query)
    assert torch.equal(band, (bias == 0)[0, 0])
    assert seen.window_kernel(query.float(), key.float(), value.float()) is None

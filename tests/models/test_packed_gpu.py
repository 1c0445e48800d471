"""Packed documents and sliding windows where there is a GPU: the kernel for unequal lengths against a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwise.models.dot_product import AttentionArguments, document_bounds, dot_product_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BATCH, SEQ, HEADS, KEY_HEADS, FEATURES = 3, 640, 8, 2, 64


def documents(most: int) -> Tensor:
    """Rows of one document, of many short ones, and of some."""
    places = torch.arange(SEQ)
    return torch.stack([places * 0, places // (-(-SEQ // most)), places // 100]).cuda()


def attended(arguments: AttentionArguments, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(BATCH, SEQ, heads, FEATURES) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *inputs, gradient = (torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    inputs = [one.bfloat16().to(dtype).requires_grad_() for one in inputs]
    output = dot_product_attention(*inputs, arguments)
    output.backward(gradient.bfloat16().to(dtype))
    return [output, *(one.grad for one in inputs if one.grad is not None)]


@pytest.mark.parametrize("window", [None, 96])
@pytest.mark.parametrize("most", [0, 16, 128])
def test_the_kernel_computes_what_a_mask_does(most: int, window: int | None) -> None:
    if not most and window is None:
        return
    arguments = AttentionArguments(True, window, 0.2, documents(most) if most else None)
    exact = attended(arguments, torch.float32)
    masked = attended(replace(arguments, documents=documents(1) if not most else arguments.documents), torch.bfloat16)
    bounds = document_bounds(arguments.documents, most) if arguments.documents is not None else None
    packed = attended(replace(arguments, bounds=bounds), torch.bfloat16)
    for right, by_mask, by_kernel in zip(exact, masked, packed, strict=True):
        error = (by_kernel.float() - right).abs().max() / right.abs().max()
        usual = (by_mask.float() - right).abs().max() / right.abs().max()
        assert error <= 2 * usual + 1e-3, (float(error), float(usual))


def test_documents_take_no_more_memory_than_whole_rows() -> None:
    plain = AttentionArguments(True, None, 0.2)
    kept = {}
    for name, arguments in (
        ("plain", plain),
        ("packed", replace(plain, documents=documents(16), bounds=document_bounds(documents(16), 16))),
    ):
        shapes = [(BATCH, SEQ, heads, FEATURES) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        before = torch.cuda.memory_allocated()
        output = dot_product_attention(*inputs, arguments)
        kept[name] = torch.cuda.memory_allocated() - before
        del output
    assert kept["packed"] <= 1.05 * kept["plain"] + 2**16

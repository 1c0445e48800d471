"""Frozen weights in fewer bits: the published formats, and the same bits however a weight is cut."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwise.models import stored as stored_weights
from shardwise.models.stored import StoredWeight, fill_stored, stored_product
from shardwise.models.weight_formats import (
    NF4_CODE,
    Region,
    dynamic_code,
    encode,
    require_whole_blocks,
    whole_blocks,
)
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import BASE_FORMATS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)
FORMS = ("bf16", "fp8", "int8", "nf4", "nf4-double")
WORST = {"bf16": 2**-8, "fp8": 2**-4, "int8": 0.5 / 127, "nf4": 0.16, "nf4-double": 0.17}  # of the largest in reach


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.03


def part_of(form: str, weight: Tensor, region: Region, read: Any = None) -> StoredWeight:
    stored = StoredWeight(form, (weight.shape[0], weight.shape[1]), region).to_empty(device="cpu")
    fill_stored(stored, read or (lambda _, wanted: wanted.of(weight)), lambda tensor: (tensor.detach(), 0))
    return stored


def whole(form: str, weight: Tensor) -> StoredWeight:
    return part_of(form, weight, Region((0, weight.shape[0]), (0, weight.shape[1])))


def test_nf4_is_the_published_algorithm() -> None:
    """The nearest of sixteen numbers to each weight over the largest of its 64, the first of two in the upper half."""
    weight = drawn(6, 128)
    blocks = weight.numpy().reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    nearest = np.abs((blocks / largest[:, None])[:, :, None] - np.array(NF4_CODE, np.float32)).argmin(2)
    packed = (nearest.reshape(-1, 2)[:, 0] << 4) | nearest.reshape(-1, 2)[:, 1]
    encoded = encode("nf4", weight)
    assert np.array_equal(encoded["codes"].flatten().numpy(), packed)
    assert np.array_equal(encoded["scales"].view(torch.float32).flatten().numpy(), largest)
    expected = np.array(NF4_CODE, np.float32)[nearest] * largest[:, None]
    assert np.array_equal(whole("nf4", weight).dense(torch.float32).numpy(), expected.reshape(weight.shape))


def test_scales_of_scales_are_the_published_algorithm() -> None:
    """Eight-bit numbers around the mean scale, with a scale for every 256 (bitsandbytes, `compress_statistics`)."""
    weight = drawn(256, 256, seed=1)
    encoded, plain = encode("nf4-double", weight), encode("nf4", weight)["scales"].view(torch.float32).flatten()
    assert torch.equal(encoded["codes"], encode("nf4", weight)["codes"])
    around = (plain - plain.mean()).view(-1, 256)
    assert encoded["offset"] == plain.mean() and torch.equal(encoded["nested"], around.abs().amax(1))
    code = torch.tensor(dynamic_code())
    assert len(code) == 256 == len(code.unique()) and float(code[-1]) == 1.0 and 0.0 in code
    back = code[encoded["scales"].flatten().int()] * encoded["nested"].repeat_interleave(256) + encoded["offset"]
    assert (back - plain).abs().max() < 0.02 * plain.max()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_left_is_near_and_takes_the_bytes_that_are_priced(form: str) -> None:
    weight = drawn(512, 1024)
    stored = whole(form, weight)
    found = stored.dense(torch.float32)
    assert (found - weight).abs().max() <= WORST[form] * weight.abs().max()
    kept = [*stored.tensors.values(), *(each for name, each in stored.named_buffers() if "code" not in name)]
    bytes_ = sum(tensor.nbytes for tensor in kept)
    extra = {"int8": 4 / 1024, "nf4-double": 1e-4}.get(form, 0)
    assert bytes_ / weight.numel() == pytest.approx(BASE_FORMATS[form].bytes, abs=extra)


@pytest.mark.parametrize("form", FORMS)
def test_a_part_has_the_bits_of_the_whole_and_reads_no_more_than_its_blocks(form: str) -> None:
    weight = drawn(384, 512)
    expected = whole(form, weight).dense(torch.float32)
    for rows, columns in (
        ((0, 128), (0, 512)),
        ((128, 384), (0, 512)),
        ((0, 384), (256, 512)),
        ((256, 384), (128, 256)),
    ):
        region, seen = Region(rows, columns), []

        def read(_: int, wanted: Region, seen: list[Region] = seen) -> Tensor:
            seen.append(wanted)
            return wanted.of(weight)

        part = part_of(form, weight, region, read)
        assert torch.equal(part.dense(torch.float32), region.of(expected))
        assert set(seen) == {whole_blocks(form, region, 384, 512)}


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_data_parallelism_divides_have_the_bits_of_the_whole(form: str) -> None:
    """Any rows of the codes, and of the scales, which are others."""
    weight = drawn(384, 256)
    expected, region = whole(form, weight), Region((0, 384), (0, 256))
    for first, last in ((0, 96), (96, 192), (288, 384)):
        stored = StoredWeight(form, (384, 256), region).to_empty(device="cpu")

        def local(tensor: Tensor, first: int = first, last: int = last) -> tuple[Tensor, int]:
            start, stop = (bound * len(tensor) // 384 for bound in (first, last))
            return tensor.detach()[start:stop], start

        fill_stored(stored, lambda _, wanted: wanted.of(weight), local)
        for name, tensor in stored.tensors.items():
            here, start = local(tensor)
            assert torch.equal(here, getattr(expected, name)[start : start + len(here)]), name


def test_products_and_their_gradients_are_those_of_the_dense_weight() -> None:
    stored = whole("nf4", drawn(32, 64))
    inputs = drawn(5, 64, seed=2).requires_grad_()
    product = stored_product(inputs, stored)
    product.square().sum().backward()
    assert torch.equal(product, torch.nn.functional.linear(inputs, stored.dense(torch.float32)))
    torch.testing.assert_close(inputs.grad, 2 * product @ stored.dense(torch.float32))
    assert not any(parameter.requires_grad for parameter in stored.parameters())


@pytest.mark.parametrize(
    ("form", "region"),
    [
        ("nf4", Region((0, 128), (0, 96))),
        ("nf4-double", Region((0, 128), (32, 128))),
        ("fp8", Region((0, 64), (0, 128))),
    ],
)
def test_blocks_that_would_be_cut_get_one_line(form: str, region: Region) -> None:
    with pytest.raises(SpecError, match="blocks of"):
        require_whole_blocks(form, "query", (128, 128), region)
    require_whole_blocks("int8", "query", (128, 128), region)


@needs_kernels
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize(("rows", "columns"), [((0, 384), (0, 512)), ((128, 384), (128, 320)), ((256, 300), (0, 512))])
@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_makes_the_same_bits(
    form: str, rows: tuple[int, int], columns: tuple[int, int], matrices: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    weights, region = drawn(matrices, 384, 512), Region(rows, columns)
    stored = StoredWeight(form, (384, 512), region, matrices).to_empty(device=DEVICE)
    fill_stored(stored, lambda number, wanted: wanted.of(weights[number]), lambda tensor: (tensor.detach(), 0))
    monkeypatch.setattr(stored_weights.kernels, "run_on", lambda device: False)
    plain = stored.dense(dtype)
    monkeypatch.setattr(stored_weights.kernels, "run_on", lambda device: True)
    made = stored.dense(dtype)
    assert made.shape == plain.shape and made.dtype == dtype
    if INTERPRETED and dtype == torch.bfloat16:  # the interpreter cuts off
        torch.testing.assert_close(made, plain, rtol=2**-7, atol=0)
    else:
        assert torch.equal(made, plain)

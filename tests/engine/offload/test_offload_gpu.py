"""Offload where there is a GPU: pinned host memory, streams of its own, a disk behind both."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.engine.offload import store
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which its sums have no order either
MODEL = {"name": "deep", "layers": 8, "hidden": 512, "heads": 4, "kv_heads": 4, "ffn": 2048, "vocab": 1024}


STEPS = 3
# 16-bit weights that a last bit of the update rounds otherwise change the next gradients: one step is comparable.
COMPARED = {"fp32": STEPS, "bf16": 1}


def job(offload: dict[str, Any], precision: str, **strategy: Any) -> Job:
    training = {"global_batch": 8, "seq": 512, "precision": precision, "graphs": False}  # which keep a step's memory
    training["compile"] = strategy.pop("compile", False)
    return Job.from_dict(
        {
            "model": MODEL,
            "cluster": "laptop:1",
            "strategy": {"microbatch": 4, "zero": 3, **strategy, "offload": offload},
            "training": training,
            "run": {"device": "cuda"},
        }
    )


def trained(folder: Path, offload: dict[str, Any], precision: str, **strategy: Any) -> tuple[int, list[torch.Tensor]]:
    """Bytes allocated at the most in the last of some steps, and the weights after those that are compared."""
    one = job(offload, precision, **strategy)
    with process_group(0, 1, str(folder / "meeting"), device="cuda"):
        engine = Engine(one, device="cuda")
        for step in range(STEPS):
            batch = sample_batch(one, step, 0).changed(lambda tensor: tensor.cuda())
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            engine.step(batch)
            # What the step has freed may be used at once, though its update is still under way.
            del batch
            _ = [torch.full((), float("nan"), device="cuda") for _ in range(256)]
            peak = torch.cuda.max_memory_allocated()
            if step + 1 == COMPARED[precision]:
                weights = [engine.optimizer.read(one.parameter, "master").cpu().clone() for one in engine.parameters]
        del engine
        gc.collect()  # what it held must not count for the next one
        return peak, weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("target", ["cpu", "nvme"])
@pytest.mark.parametrize(
    "kinds", [("optimizer",), ("activations",), ("optimizer", "weights"), ("optimizer", "weights", "gradients")]
)
def test_equal_weights_with_less_memory(tmp_path: Path, kinds: tuple[str, ...], target: str, precision: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, expected = trained(tmp_path / "a", {}, precision)
    there, found = trained(tmp_path / "b", {**dict.fromkeys(kinds, 1.0), "target": target}, precision)
    assert there < 0.9 * here
    for one, other in zip(found, expected, strict=True):
        # Sums of gradients come in another order every run, and AdamW makes a step of the smallest of them.
        assert float((one - other).abs().max() / other.abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("kinds", "strategy"),
    [
        (("optimizer",), {"zero": 0}),
        (("optimizer",), {"zero": 0, "microbatch": 8, "compile": True}),
        (("optimizer",), {}),
        (("optimizer", "weights"), {}),
        (("optimizer", "weights"), {"microbatch": 8}),
    ],
)
def test_states_updated_beside_the_next_pass_leave_the_same_bits(
    tmp_path: Path, kinds: tuple[str, ...], strategy: dict[str, Any], in_order: None
) -> None:
    """Waits of layers, compiled layers and gathers for their own weights: three steps in a row with none between."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, expected = trained(tmp_path / "a", {}, "fp32", **strategy)
    _, found = trained(tmp_path / "b", dict.fromkeys(kinds, 1.0), "fp32", **strategy)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kinds", "strategy"),
    [
        (("activations",), {}),
        (("activations",), {"recompute": "full"}),
        (("activations",), {"compile": True}),
        (("activations",), {"compile": True, "recompute": "full"}),
        (("optimizer", "activations"), {"recompute": "full"}),
    ],
)
def test_large_regions_are_pinned_as_they_are(
    tmp_path: Path, kinds: tuple[str, ...], strategy: dict[str, Any], in_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(store, "EXACT_FROM", 2**14)
    _, expected = trained(tmp_path / "a", {}, "fp32", **strategy)
    _, found = trained(tmp_path / "b", dict.fromkeys(kinds, 1.0), "fp32", **strategy)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def in_order() -> Iterator[None]:
    """Kernels that add in the same order every time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kinds", [("optimizer",), ("optimizer", "weights")])
def test_a_skipped_step_leaves_the_weights(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    one = job(dict.fromkeys(kinds, 1.0), "bf16")
    with process_group(0, 1, str(tmp_path / "meeting"), device="cuda"):
        engine = Engine(one, device="cuda")
        batch = sample_batch(one, 0, 0).changed(lambda tensor: tensor.cuda())
        losses = [engine.step(batch, loss_limit=limit).loss for limit in (None, 0.0, 0.0, None, None)]
        del engine
        gc.collect()
    learnt, *skipped, again = map(float, losses)
    assert skipped == pytest.approx([skipped[0]] * 3, rel=1e-3)
    assert again < skipped[0] < learnt

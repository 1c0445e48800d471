"""Offload where there is a GPU: pinned host memory, streams of its own, a disk behind both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.engine.engine import Engine
from shardwise.engine.world import joined
from shardwise.measure.sample import sample_batch
from shardwise.spec import Job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = {"name": "deep", "layers": 8, "hidden": 512, "heads": 4, "kv_heads": 4, "ffn": 2048, "vocab": 1024}


def trained(folder: Path, offload: dict[str, Any], precision: str) -> tuple[int, list[torch.Tensor]]:
    """Bytes allocated at the most in the last of some steps, and the weights after it."""
    training = {"global_batch": 8, "seq": 512, "precision": precision}
    one = Job.from_dict(
        {"model": MODEL, "cluster": "laptop:1", "strategy": {"microbatch": 4, "offload": offload}, "training": training}
    )
    with joined(0, 1, str(folder / "meeting"), device="cuda"):
        engine = Engine(one, device="cuda")
        for step in range(3):
            batch = sample_batch(one, step, 0).changed(lambda tensor: tensor.cuda())
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            engine.step(batch)
        weights = [engine.optimizer.read(held.parameter, "master").cpu().clone() for held in engine.parameters]
        return torch.cuda.max_memory_allocated(), weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("target", ["cpu", "nvme"])
@pytest.mark.parametrize("kind", ["optimizer", "activations"])
def test_equal_weights_with_less_memory(tmp_path: Path, kind: str, target: str, precision: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, expected = trained(tmp_path / "a", {}, precision)
    there, found = trained(tmp_path / "b", {kind: 1.0, "target": target}, precision)
    assert there < 0.9 * here
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

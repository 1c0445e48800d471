"""`verify` of mixtures in FP8: rounding that changes a token's experts is no error, one expert's wrong gradient is."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from engine.parity import references
from engine.test_planted_mistakes import Mistaken
from engine.workers import pool
from shardwise.engine.parameters import local
from shardwise.engine.trainer import Trainer
from shardwise.measure.verify import FP8_BOUNDS, Verification, verify
from shardwise.models.decoder import is_stack_of_experts
from shardwise.spec import Job

# Many experts whose scores are close, weighed heavily: where FP8 changes the experts of some tokens, all gradients
# together are 44% off.
MODEL = {"name": "flips", "hidden": 64, "layers": 3, "heads": 2, "ffn": 128, "vocab": 128, "max_seq": 32,
         "activation": "swiglu", "norm": "rmsnorm", "numerics": {"router_scale": 16.0},
         "moe": {"experts": 64, "top_k": 2, "ffn": 64}}  # fmt: skip
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep": ("fp8-rowwise", {"dp": 2, "ep": 2}),
    "tp": ("fp8-rowwise", {"tp": 2, "sequence_parallel": True}),
    "cp": ("fp8-delayed", {"cp": 2}),
    "pp": ("fp8", {"pp": 2, "stage_layers": [1, 2]}),
    "zero-3": ("fp8-rowwise", {"dp": 2, "zero": 3}),
    "recompute": ("fp8", {"dp": 2, "recompute": "full"}),
}


def job_of(precision: str = "fp8", ranks: int = 1, **strategy: Any) -> Job:
    training = {"precision": precision, "seq": 32, "global_batch": ranks}
    strategy = {"microbatch": 1} | strategy
    return Job.from_dict({"model": MODEL, "cluster": f"laptop:{ranks}", "training": training, "strategy": strategy})


def verified(job: Job, processes: Any, steps: int = 1) -> Verification:
    return verify(job, steps=steps, pool=processes, references=references())


def without_one_expert(self: Trainer[Any], batch: Any, right: Any = Trainer.forward_backward) -> Tensor:
    """In FP8 the gradient of one expert, of the middle one by its size, is lost on the first rank that holds it."""
    loss: Tensor = right(self, batch)
    if self.job.training.recipe.scaling:
        one = next(one for one in self.parameters if is_stack_of_experts(one.name))
        gradient = self.gradient(one)
        assert gradient is not None
        sizes = local(gradient).flatten(1).norm(dim=1)
        trained = sizes.nonzero().flatten()
        local(gradient)[trained[sizes[trained].argsort()[len(trained) // 2]]] = 0
    return loss


LOST: Any = Mistaken("shardwise.engine.trainer.Trainer.forward_backward", without_one_expert)


def test_changed_experts_are_no_error_and_a_lost_expert_is_one() -> None:
    found = verified(job_of(), pool())
    assert found.ok, found.in_fp8
    assert found.in_fp8["gradient"].value > 0
    lost = verified(job_of(), LOST)
    assert max(one.value for one in lost.worst.values()) <= lost.tolerance
    assert not lost.ok and lost.in_fp8["gradient"].value > FP8_BOUNDS["gradient"]
    assert lost.in_fp8["gradient"].where.startswith("expert ")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_as_far_off_as_one_process(layout: str) -> None:
    precision, strategy = LAYOUTS[layout]
    job = job_of(precision, 2, **strategy)
    found = verified(job, pool(), steps=3)
    assert found.ok, found.in_fp8
    lost = verified(job, LOST)
    assert not lost.ok and lost.in_fp8["gradient"].where.startswith("expert ")

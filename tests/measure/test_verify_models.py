"""Fields of models and layouts crossed at random: each job is refused in one line, or equals one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.parity import references
from engine.workers import pool
from shardwise.measure.reference import TOLERANCE, gradient_scales
from shardwise.measure.verify import verify
from shardwise.spec import Job
from shardwise.spec.errors import SpecError

LATENT = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
EXPERTS = {"experts": 4, "top_k": 2, "ffn": 32}
FIELDS: dict[str, tuple[Any, ...]] = {
    "kv_heads": (None, 1, 2), "activation": ("gelu", "relu", "swiglu", "geglu"), "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "rope", "none"), "tied_embeddings": (False, True), "qkv_bias": (False, True),
    "attention_out_bias": (False, True), "mlp_bias": (False, True), "lm_head_bias": (False, True),
    "qk_norm": (False, True), "norms_per_layer": (2, 2, 4), "norm_bias": (True, False), "final_norm": (True, False),
    "parallel_block": (False, False, True), "causal": (True, True, False), "sliding_window": (None, None, 8),
    "sliding_window_every": (1, 2), "head_dim": (None, 12, 7), "vocab": (96, 51), "mla": (None, None, LATENT),
    "moe": (None, None, EXPERTS, {**EXPERTS, "shared_ffn": 32, "router": "sigmoid", "router_bias": True}),
}  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"dp": 2, "zero": 3}, {"cp": 2}, {"pp": 2, "schedule": "zb-h1"},
    {"cp": 2, "context_method": "ulysses"}, {"dp": 2, "ep": 2, "zero": 1}, {"tp": 2, "recompute": "selective"},
)  # fmt: skip


def drawn(seed: int) -> dict[str, Any]:
    choice = random.Random(seed).choice
    shape = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "max_seq": 32, "name": f"drawn {seed}"}
    model = shape | {name: choice(values) for name, values in FIELDS.items()}
    training = {"global_batch": 4, "seq": choice((16, 16, 7)), "precision": "fp32"}
    return {"model": model, "cluster": "laptop:2", "strategy": choice(LAYOUTS), "training": training}


def check(seed: int) -> bool:
    """Whether it ran; what is not run is refused by the rules or the matrix, never by a worker."""
    try:
        found = verify(Job.from_dict(drawn(seed)), steps=1, pool=pool(), references=references())
    except SpecError as error:
        assert error.field and error.remedy and "\n" not in str(error)
        return False
    assert found.ok, {kind: (one.value, one.where) for kind, one in found.worst.items()}
    return True


def test_biases_of_experts_do_not_decay() -> None:
    """They have two dimensions, as matrices do."""
    assert check(101)


def test_gradients_of_keys_that_are_rounding_at_the_fifth_digit() -> None:
    """The single process itself is 1e-5 off the same in double precision."""
    assert check(139)


def test_a_small_gradient_may_not_be_another() -> None:
    gradients = {"layers.0.value": torch.tensor([1.0]), "layers.0.key": torch.tensor([1e-4]),
                 "layers.1.key": torch.tensor([1e-4])}  # fmt: skip
    scales, eps = gradient_scales(gradients), torch.finfo(torch.float32).eps
    assert eps / scales["layers.0.key"] <= TOLERANCE * 1.001  # a rounding of what stands beside it
    assert 1e-4 / scales["layers.0.key"] > 100 * TOLERANCE  # none, or twice
    assert scales["layers.1.key"] == gradients["layers.1.key"].item()


def test_models_at_random_are_refused_or_equal() -> None:
    assert sum(check(seed) for seed in range(4)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_more_models_at_random_are_refused_or_equal(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)

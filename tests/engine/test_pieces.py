"""MLPs in pieces: the weights of those computed at once, in the memory that is planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from engine.workers import on_ranks
from shardwise.api import plan
from shardwise.cost.memory.device import memory_of_rank
from shardwise.engine.engine import Engine
from shardwise.engine.parameters import local
from shardwise.layout import pieces
from shardwise.measure.dryrun.run import dry_run
from shardwise.measure.reference import sample_batch
from shardwise.models import attention
from shardwise.spec import Job

SMALL = 2**13  # activations of an MLP at once: pieces of EVEN_TOKENS at the most


@contextmanager
def in_pieces(of: int) -> Iterator[None]:
    with mock.patch.object(pieces, "MLP_AT_ONCE", of), mock.patch.object(attention, "ROTATED_AT_ONCE", of):
        yield


def job(model: Any = "tiny", precision: str = "fp32", training: Any = None, **strategy: Any) -> Job:
    world = strategy.get("dp", 1) * strategy.get("tp", 1) * strategy.get("pp", 1) * strategy.get("cp", 1)
    fields = {"global_batch": 4, "seq": 512, "precision": precision, **(training or {})}
    strategy = {"recompute": "full", "microbatch": 1, **strategy}
    return Job.from_dict({"model": model, "cluster": f"laptop:{world}", "strategy": strategy, "training": fields})


def trained(one: Job, of: int) -> dict[str, torch.Tensor]:
    """Weights after three steps."""
    with in_pieces(of):
        engine = Engine(one)
        for step in range(3):
            engine.step(sample_batch(one, step, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp")))
    return {held.name: local(held.parameter).detach().clone() for held in engine.parameters}


LORA = {"adapters": {"rank": 4}}
PLAIN = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 64}
CASES: dict[str, Job] = {
    "gated": job(),
    "gpt": job({**PLAIN, "mlp_bias": True}),
    "lora": job(training=LORA),
    "square": job({**PLAIN, "ffn": 64}, training={"adapters": {"rank": 64}}),
    "dora": job(training={"adapters": {"rank": 4, "method": "dora"}}),
    "nf4": job({**PLAIN, "activation": "swiglu"}, training={**LORA, "base_precision": "nf4"}),
    "norms": job(training={"trained": ["norms"]}),
    "first-mlp": job(training={"trained": ["layers.0.mlp"]}),
    "prediction": job({**PLAIN, "mtp_layers": 1}),
    "zero-3": job(dp=2, zero=3),
    "zbv": job(pp=2, schedule="zbv"),
    "ring": job(cp=2),
    "offloaded": job(offload={"activations": 1.0}),
    "some-layers": job(recompute_layers=1),
    "dropout-is-whole": job(training={"adapters": {"rank": 4, "dropout": 0.3}}),
    "tp-is-whole": job(tp=2),
}  # fmt: skip


QUICK = ("gated", "gpt", "nf4", "zero-3", "offloaded")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_the_weights_are_those_of_whole_mlps(name: str) -> None:
    one = CASES[name]
    whole, cut = (on_ranks(one.strategy.world, trained, one, of) for of in (2**40, SMALL))
    for expected, found in zip(whole, cut, strict=True):
        for weight, tensor in expected.items():
            torch.testing.assert_close(found[weight], tensor, rtol=1e-4, atol=1e-6, msg=f"{name}: {weight}")


WIDE = {"layers": 4, "hidden": 512, "heads": 16, "kv_heads": 4, "ffn": 2048, "vocab": 256, "norm": "rmsnorm"}
PLANNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gated": ({**WIDE, "activation": "swiglu"}, {}),
    "plain": (WIDE, {}),
    "lora": ({**WIDE, "activation": "swiglu"}, LORA),
    "every-head": ({**WIDE, "activation": "swiglu", "kv_heads": 16}, LORA),
    "norms": ({**WIDE, "activation": "swiglu"}, {"trained": ["norms"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "offload"),
    [*((name, {}) for name in PLANNED), *((name, {"activations": 1.0}) for name in ("lora", "norms"))],
)
def test_memory_and_flops_are_as_planned(name: str, offload: dict[str, float]) -> None:
    model, training = PLANNED[name]
    strategy = {"recompute": "full", "microbatch": 1, "offload": offload}
    fields = {"global_batch": 1, "seq": 16384, "precision": "bf16", **training}
    one = Job.from_dict({"model": model, "cluster": "laptop:1", "strategy": strategy, "training": fields})
    with in_pieces(2**21):
        found = dry_run(one)
        planned = memory_of_rank(one, 0).total
    assert not [f"{line.what} {line.difference:+.1%}" for line in found.defects]
    assert planned < 0.8 * memory_of_rank(one, 0).total  # of whole MLPs


def test_a_plan_finds_long_sequences_on_one_gpu() -> None:
    """QLoRA of an 8B in 80 GB beyond the 342,733 tokens that Unsloth publishes."""
    training = {"adapters": {"rank": 16}, "base_precision": "nf4", "seq": 450_000, "global_batch": 1}
    best = plan({"model": "llama3-8b", "cluster": "dgx-h100:1", "training": training}, gpus=1, precision="bf16").job
    assert best.strategy.recompute == "full" and best.strategy.offload.activations == 1.0

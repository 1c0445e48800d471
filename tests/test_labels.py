"""Words are for people: to reword every description moves no price, no memory, no rank of a plan and no comparison.

That no code of the packages that decide reads a description is one of the rules in `source_rules`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cost.builders import GPT, LLAMA, MLA_MOE, MOE, job, switched
from shardwise.cost.analysis import analyze
from shardwise.cost.compute.operators import OperatorRole
from shardwise.cost.memory.activations import SavedRole
from shardwise.cost.memory.device import device_memories
from shardwise.cost.step.prediction import predict
from shardwise.cost.step.simulation import COMMUNICATION, simulated_step, step_parts
from shardwise.cost.traffic.execution import step_traffic
from shardwise.layout.payloads import Payload, Phase, Role, Share
from shardwise.layout.stages import rank_contents
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec.job import Job
from shardwise.spec.model import MatrixRole
from shardwise.spec.stack import Stack

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardwise"
DESCRIPTIONS: tuple[type[Enum], ...] = (Role, Phase, Share, SavedRole, OperatorRole, MatrixRole)
HOST = {"host_link": {"bandwidth": 1e9, "latency": 1e-6}}


def forget() -> None:
    """All that is remembered between two prices: what was computed with other words must not answer."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardwise."):
            for one in vars(module).values():
                if isinstance(one, functools._lru_cache_wrapper):
                    one.cache_clear()


@pytest.fixture
def reworded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Called, every description becomes the same word."""

    def reword() -> None:
        for descriptions in DESCRIPTIONS:
            for one in descriptions:
                monkeypatch.setattr(one, "_value_", "thing")
        forget()

    forget()
    yield reword
    monkeypatch.undo()
    forget()


def cases() -> dict[str, Job]:
    eager = Stack(elementwise="eager", tp_gradients="in turn", dummy_gradients=True)
    pieces = Stack(gated_activation="separate", latents="cut")
    return {
        "tensor": job(GPT, dp=2, tp=4, cluster=switched(8)),
        "async tensor": job(LLAMA, dp=2, tp=4, overlap={"tp": True}, cluster=switched(8)).unchecked(stack=eager),
        "context": job(LLAMA, dp=2, cp=4, recompute="full"),
        "pipeline": job(GPT, dp=2, pp=4, zero=1),
        "experts": job(MOE, dp=4, tp=2, ep=4, zero=3),
        "split experts": job(MOE, dp=2, tp=2, ep=2, expert_tp=2, sequence_parallel=False),
        "latent": job(MLA_MOE, dp=2, tp=2, recompute="selective").unchecked(stack=pieces),
        "offload": job(LLAMA, dp=4, zero=3, offload={"optimizer": 1, "activations": 0.5}, cluster=switched(4, **HOST)),
        "compressed": job(LLAMA, dp=4, compression={"method": "powersgd"}),
    }


def figures(case: Job) -> list[Any]:
    """All that is said of a job in figures."""
    ranks = range(case.strategy.pp)
    traffics = [one for rank in ranks for one in step_traffic(case, rank_contents(case, rank))]
    simulated, analysis = simulated_step(predict(case)), analyze(case)
    return [
        [(one.dimension, one.kind, one.in_pass, one.seconds, one.size_bytes, one.count) for one in traffics],
        predict(case).step_seconds,
        step_parts(simulated),
        [vars(memory) for memory in device_memories(case)],
        [
            (one.exposed_seconds, one.added_seconds)
            for name in COMMUNICATION
            for one in analysis.dimension_traffics(name)
        ],
    ]


@pytest.mark.parametrize("name", cases())
def test_rewording_moves_no_price_and_no_memory(name: str, reworded: Any) -> None:
    before = figures(cases()[name])
    reworded()
    assert {Payload(role, Phase.FORWARD).subject for role in Role} == {"thingthing"}
    assert figures(cases()[name]) == before


def test_rewording_moves_no_rank_of_a_plan(reworded: Any) -> None:
    def planned() -> list[Any]:
        request = Request(Job.from_dict({"model": "tiny", "cluster": "dgx-h100:1", "training": {"global_batch": 64}}))
        found = plan(request)
        assert isinstance(found, Plan)
        return [(one.job.strategy, one.step_seconds, one.memory.total) for one in found.candidates]

    before = planned()
    reworded()
    assert planned() == before

"""What the exchange of tokens sends, and what the cost model prices for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.workers import on_ranks
from shardwise.cost.traffic.expert import expert_traffic
from shardwise.cost.traffic.tensor import tensor_traffic
from shardwise.engine.experts.apply import apply_experts
from shardwise.engine.mesh import build_mesh
from shardwise.layout.stages import rank_contents
from shardwise.models.moe import MoELayer, at_once
from shardwise.spec.job import Job

TOKENS, HIDDEN, EXPERTS, TOP_K = 1024, 8, 64, 4
LEVEL = {"topology": "switch", "size": 2, "bandwidth": "10GB/s", "latency": "5us"}


def job(**strategy: Any) -> Job:
    """One layer of experts on two nodes of two devices, in fp32."""
    return Job.from_dict(
        {
            "model": {
                "layers": 1, "hidden": HIDDEN, "heads": 2, "ffn": 16, "vocab": 32, "activation": "swiglu",
                "moe": {"experts": EXPERTS, "top_k": TOP_K, "ffn": 8},
            },
            "cluster": {"device": "h100-sxm", "levels": [{"name": "inside", **LEVEL}, {"name": "between", **LEVEL}]},
            "strategy": strategy,
            "training": {"seq": TOKENS, "global_batch": 4, "precision": "fp32"},
        }
    )  # fmt: skip


def priced(one: Job) -> dict[str, float]:
    """Bytes that a rank sends, by what."""
    contents = rank_contents(one, 0)
    lines = [*expert_traffic(one, contents), *tensor_traffic(one, contents)]
    assert one.microbatches == 4 // one.strategy.data_parallel
    return {line.what: float(line.cost.sent_bytes) for line in lines}


def on_a_rank(text: str) -> dict[str, int]:
    """Bytes of one dispatch and combine with an even load."""
    one = Job.from_yaml(text)
    made = MoELayer(one.model)
    exchange: Any = apply_experts(made, build_mesh(one.strategy), one.strategy, lambda rank: rank // 2)
    torch.manual_seed(dist.get_rank())
    rows = torch.randn(int(one.microbatch_tokens) // one.strategy.tp, HIDDEN, requires_grad=True)
    indices = torch.rand(rows.shape[0], EXPERTS).topk(TOP_K).indices
    sorted_rows, counts, handle = exchange.dispatch(rows, indices)
    result = exchange.combine(made.experts(sorted_rows, at_once(counts)), torch.ones(indices.shape), handle)
    result.backward(torch.ones_like(result))
    traffic = exchange.traffic
    names = {*traffic.between_nodes, *traffic.inside_node}
    return {name: traffic.between_nodes.get(name, 0) + traffic.inside_node.get(name, 0) for name in names}


@pytest.mark.parametrize("dispatch", ["all-to-all", "deduplicated"])
def test_tokens_to_experts(dispatch: str) -> None:
    case = job(ep=4, dispatch=dispatch)
    found, prices = on_ranks(4, on_a_rank, case.to_yaml()), priced(case)
    for what in ("dispatch", "combine"):
        for forward, backward in ((f"{what}, forward", what), (f"{what}, backward", f"{what}, backward")):
            mean = sum(one[backward] for one in found) / 4
            assert mean == pytest.approx(prices[forward], rel=0.02)


def test_tokens_of_ranks_that_split_experts() -> None:
    case = job(tp=2, ep=2, expert_tp=2)
    found, prices = on_ranks(4, on_a_rank, case.to_yaml()), priced(case)
    for what, price in (
        ("expert tokens", "expert tokens, forward"),
        ("expert outputs", "expert outputs, forward"),
        ("expert outputs, backward", "expert output gradients, backward"),
        ("expert tokens, backward", "expert token gradients, backward"),
    ):
        assert sum(one[what] for one in found) / 4 == pytest.approx(prices[price], rel=0.02)


DRY_RUN = """
import sys, torch, torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwise.engine.experts.rows import Assumed
from shardwise.engine.experts.apply import apply_experts
from shardwise.engine.mesh import build_mesh
from shardwise.models.moe import MoELayer
from shardwise.spec.job import Job
one = Job.from_yaml(sys.stdin.read())
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
mesh = build_mesh(one.strategy)
with torch.device("meta"):
    made = MoELayer(one.model)
exchange = apply_experts(made, mesh, one.strategy, lambda rank: rank // 2)
exchange.assumed = Assumed()
with FakeTensorMode(allow_non_fake_inputs=True):
    made.to_empty(device="cpu")
    result = made(torch.randn(1, int(one.microbatch_tokens), one.model.hidden, requires_grad=True))
    result.backward(torch.ones_like(result))
print(exchange.traffic.between_nodes["dispatch, backward"] + exchange.traffic.inside_node["dispatch, backward"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all-to-all", "deduplicated"])
def test_a_dry_run_with_an_even_load(dispatch: str) -> None:
    case = job(ep=4, dispatch=dispatch)
    done = subprocess.run(
        [sys.executable, "-c", DRY_RUN], input=case.to_yaml(), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == pytest.approx(priced(case)["dispatch, backward"], rel=0.001)

"""Korthikanti et al. 2022, Figures 1 and 7, from the repository's table of published points.

The figures count layers only: no embedding, no head, no framework memory; states are 18 bytes per parameter
(fp16 weights, fp32 gradients and Adam) of 12·L·h² weights.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from cost.builders import DENSE, GIB, job, preset
from shardwise.cost.memory.activations import embedding_activation_bytes, head_activation_bytes, layer_activation_bytes
from shardwise.cost.memory.device import activation_bytes, memory_of_rank, peak_memory
from shardwise.cost.memory.in_flight import chunks_in_flight
from shardwise.cost.memory.room import allocated_bytes, fit_of
from shardwise.layout.stages import rank_contents
from shardwise.spec.job import Job
from shardwise.spec.stack import stack_from

TABLE = Path(__file__).parents[3] / "validation" / "memory_points.csv"


@dataclass(frozen=True)
class Run:
    """A row of the paper's Table 3."""

    model: str
    pp: int
    interleave: int
    microbatch: int
    batch: int


RUNS = {
    "GPT-22B": Run("megatron-22b", 1, 1, 4, 4),
    "GPT-175B": Run("gpt3-175b", 8, 3, 1, 64),
    "GPT-530B": Run("mt-nlg-530b", 35, 3, 1, 280),
    "GPT-1T": Run("megatron-1t", 64, 1, 1, 512),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "activations, TP baseline no recompute": {"sequence_parallel": False},
    "activations, SP + selective": {"recompute": "selective"},
    "SP only": {},
    "selective only": {"sequence_parallel": False, "recompute": "selective"},
    "SP+selective": {"recompute": "selective"},
    "full recompute": {"sequence_parallel": False, "recompute": "full"},
}


def points(figure: str) -> list[tuple[str, str, float]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if f"2022 {figure}" in row["source"]]
    return [(row["case"].partition(",")[0], row["quantity"], float(row["value"])) for row in rows]


def korthikanti_job(name: str, **strategy: Any) -> Job:
    run = RUNS[name]
    if run.interleave > 1:
        strategy |= {"schedule": "interleaved", "interleave": run.interleave}
    training = {"seq": 2048, "global_batch": run.batch, "dropout": True, "attention": "unfused"}
    training["precision"] = "bf16-fp32-grads"
    return job(run.model, training=training, tp=8, dp=1, pp=run.pp, microbatch=run.microbatch, **strategy)


def first_rank_activations(name: str, variant: str) -> float:
    """Of the layers alone, as in the figures."""
    case = korthikanti_job(name, **VARIANTS[variant])
    contents = rank_contents(case, 0)
    in_flight = chunks_in_flight(case, 0) / case.strategy.chunks_per_rank
    rest = embedding_activation_bytes(case) * in_flight
    if contents.has_head:
        rest += head_activation_bytes(case)
    return activation_bytes(case, contents) - rest


@pytest.mark.parametrize(("name", "quantity", "value"), [p for p in points("Fig. 1") if "activations" in p[1]])
def test_figure_1_activations(name: str, quantity: str, value: float) -> None:
    assert first_rank_activations(name, quantity) / GIB == pytest.approx(value, rel=0.001)


@pytest.mark.parametrize(("name", "value"), [(p[0], p[2]) for p in points("Fig. 1") if "params" in p[1]])
def test_figure_1_parameters_and_optimizer(name: str, value: float) -> None:
    """A middle rank has layers only; its biases and norms are 13/(12·h) more than the figure counts."""
    case = korthikanti_job(name)
    layers, h, ranks = case.model.layers, case.model.hidden, 8 * case.strategy.pp
    by_figure = 12 * layers * h**2 * 18 / ranks
    assert by_figure / GIB == pytest.approx(value, rel=0.001)
    if case.strategy.pp == 1:
        # One stage: leave out what is not a layer (embedding with positions, final norm).
        states = memory_of_rank(case, 0).states - 18 * ((51200 / 8 + 2048) * h + 2 * h)
    else:
        states = memory_of_rank(case, case.strategy.pp // 2).states
    assert states == pytest.approx(by_figure, rel=0.001)


@pytest.mark.parametrize(("name", "quantity", "percent"), points("Fig. 7"))
def test_figure_7_share_of_the_tensor_parallel_baseline(name: str, quantity: str, percent: float) -> None:
    """Readings of a bar chart: within 1.2 %, and within 0.4 points."""
    share = 100 * first_rank_activations(name, quantity)
    share /= first_rank_activations(name, "activations, TP baseline no recompute")
    assert share == pytest.approx(percent, rel=0.012)
    assert abs(share - percent) < 0.4


def test_every_published_point_is_used() -> None:
    assert len(points("Fig. 1")) == 12
    assert len(points("Fig. 7")) == 16


@pytest.mark.parametrize("name", ["GPT-175B", "GPT-530B"])
def test_interleaving_costs_its_factor(name: str) -> None:
    """L layers' worth in flight on the first rank, times 1 + (p−1)/(p·v) (section 4.2.3)."""
    run, layers = RUNS[name], korthikanti_job(name).model.layers
    one_layer = layer_activation_bytes(korthikanti_job(name), DENSE)
    factor = 1 + (run.pp - 1) / (run.pp * run.interleave)
    assert first_rank_activations(name, "SP only") == pytest.approx(one_layer * layers * factor)


def test_a_million_tokens_under_trl() -> None:
    """Qwen3-8B on eight H100: 56.2 GB with a loss in pieces and offloaded checkpoints (huggingface/trl#6845)."""
    fields: dict[str, Any] = {
        "model": {**preset("qwen3-8b").to_dict(), "max_seq": 2**20},
        "cluster": "dgx-h100:1",
        "strategy": {"cp": 8, "zero": 3, "recompute": "full", "offload": {"activations": 1.0}},
        "training": {"global_batch": 1, "seq": 2**20, "precision": "bf16"},
    }
    chunked, plain = (Job.from_dict({**fields, "stack": stack}) for stack in ("trl", "accelerate"))
    assert allocated_bytes(chunked, peak_memory(chunked)) == pytest.approx(56.2e9, rel=0.12)
    assert fit_of(chunked) == "fits"
    assert fit_of(plain) == "does not fit"


# -- full fine-tuning, as printed: what the Trainer of transformers of 2024 allocates at most, in GiB ---------

# foundation-model-stack/fms-acceleration, scripts/benchmarks/refs (A100, A100 with Liger), and linkedin/Liger-Kernel,
# examples/huggingface: every layer is repeated. Weights in bf16 where there is one GPU, fp32 shards under FSDP1.
TUNED: tuple[tuple[str, int, int, int, dict[str, Any], float], ...] = (
    ("mistral-7b", 1, 4, 4096, {"masters": "none"}, 67.49),
    ("mistral-7b", 2, 4, 4096, {"masters": "none"}, 33.74),
    ("mistral-7b", 2, 8, 4096, {"loss": "pieces"}, 67.49),
    ("mistral-7b", 4, 8, 4096, {"loss": "pieces", "gated_activation": "fused", "norms": "fused"}, 37.0),
    ("mistral-7b", 4, 16, 4096, {"loss": "pieces", "gated_activation": "fused", "norms": "fused"}, 52.51),
    ("llama3-8b", 4, 4, 4096, {"loss": "pieces", "gated_activation": "fused", "norms": "fused"}, 37.4),
    ("llama3-8b", 4, 16, 4096, {"loss": "pieces", "gated_activation": "fused", "norms": "fused"}, 56.2),
    ("llama3-8b", 4, 32, 512, {}, 52.7),
    ("llama3-8b", 4, 48, 512, {}, 66.9),
)


@pytest.mark.parametrize(("model", "gpus", "microbatch", "seq", "changes", "printed"), TUNED)
def test_full_fine_tuning_as_printed(
    model: str, gpus: int, microbatch: int, seq: int, changes: dict[str, Any], printed: float
) -> None:
    in_bf16 = changes.get("masters") == "none"
    if in_bf16:
        changes = {**changes, "sharded_parameters": "16-bit", "autocast": False, "gradient_reduce": "bf16"}
    training = {"seq": seq, "optimizer": "adamw-bf16-moments" if in_bf16 else "adamw"}
    layout: dict[str, Any] = {"dp": gpus, "zero": 3 if gpus > 1 else 0, "recompute": "full", "microbatch": microbatch}
    case = job(model, training={**training, "global_batch": gpus * microbatch}, **layout)
    case = replace(case, stack=stack_from("accelerate@0.34").changed(**changes))
    assert peak_memory(case).total / GIB == pytest.approx(printed, rel=0.035)

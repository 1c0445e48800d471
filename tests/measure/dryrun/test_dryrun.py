"""A dry run of the real engine: equal to the planner's figures in every dimension, extended exactly, quick."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.layout.groups import rank_at
from shardwise.measure.dryrun.result import DryRun
from shardwise.measure.dryrun.run import dry_run
from shardwise.spec.job import Job

SMALL = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 192, "vocab": 512, "activation": "swiglu",
         "norm": "rmsnorm"}  # fmt: skip
DEEPER = {**SMALL, "layers": 7}
MIXTURE = {**SMALL, "moe": {"experts": 8, "top_k": 2, "ffn": 64}}
LATENT = {**SMALL, "hidden": 256, "kv_heads": 8, "ffn": 512,
          "mla": {"kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32, "q_rank": 96}}  # fmt: skip
FULL_QUERIES = {**LATENT, "mla": {**LATENT["mla"], "q_rank": None}}
WIDE = {**MIXTURE, "hidden": 512, "moe": {"experts": 16, "top_k": 2, "ffn": 64}}  # beside what counts tokens


def job(model: Any, strategy: dict[str, Any], batch: int | None = None, nodes: int = 1, **training: Any) -> Job:
    return Job.from_dict(
        {
            "model": model,
            "cluster": f"dgx-h100:{nodes}",
            "strategy": strategy,
            "training": {"seq": 256, "global_batch": batch, **training},
        }
    )


def differing(found: DryRun, *, memory: bool) -> list[str]:
    return [f"{one.what} {one.difference:+.1%}" for one in found.defects if memory or one.what != "peak memory"]


# -- bytes: of a small model, every dimension ---------------------------------------------------------

QUICK = {
    "tp-sp": job(SMALL, {"tp": 2, "dp": 4, "zero": 1}, 8),
    "unlike-shares": job(SMALL, {"dp": 8, "dp_shares": [3, 1, 1, 1, 1, 1, 1, 1], "zero": 1}, 40),
    "zero-3": job(SMALL, {"dp": 8, "zero": 3}, 16),
    "pp": job(SMALL, {"pp": 2, "dp": 4}, 16),
    "ep": job(MIXTURE, {"dp": 8, "ep": 4}, 8),
    "cp-ring": job(SMALL, {"cp": 4, "dp": 2}, 4),
    "offload": job(
        {**SMALL, "layers": 2},
        {"dp": 8, "zero": 3, "offload": {"optimizer": 1.0, "weights": 1.0, "gradients": 1.0, "activations": 1.0}},
        8,
    ),
}
SLOW = {
    "zero-0": job(SMALL, {"dp": 8}, 16),
    "window": job({**SMALL, "sliding_window": 64}, {"dp": 8}, 8),
    "latent-tp": job(LATENT, {"tp": 2, "dp": 4}, 8),
    "int8-gradients": job(SMALL, {"dp": 8, "compression": "int8"}, 16),
    "zero-1": job(SMALL, {"dp": 8, "zero": 1}, 16),
    "1-bit-gradients": job(SMALL, {"dp": 4, "tp": 2, "compression": "1bit"}, 16),
    "1-bit-adam": job(SMALL, {"dp": 4, "pp": 2, "compression": {"method": "1bit-adam", "exact_steps": 9}}, 16),
    "powersgd": job(MIXTURE, {"dp": 8, "ep": 2, "compression": "powersgd"}, 16),
    "zero-2": job(SMALL, {"dp": 8, "zero": 2}, 16),
    "zero-3-kept": job(SMALL, {"dp": 8, "zero": 3, "keep_parameters": True}, 16),
    "accumulate-local": job(SMALL, {"dp": 8, "zero": 3, "accumulate": "local"}, 16),
    "hybrid": job(SMALL, {"dp": 16, "zero": 3, "shard_group": 8}, 32, nodes=2),
    "hybrid-experts": job(MIXTURE, {"pp": 2, "dp": 4, "ep": 2, "zero": 3, "shard_group": 2}, 16),
    "tp-plain": job(SMALL, {"tp": 2, "dp": 4, "sequence_parallel": False}, 8),
    "cp-all-gather": job(SMALL, {"cp": 4, "dp": 2, "context_method": "all-gather"}, 4),
    "cp-ulysses": job(SMALL, {"cp": 4, "dp": 2, "context_method": "ulysses"}, 4),
    "gpipe": job(SMALL, {"pp": 2, "dp": 4, "schedule": "gpipe"}, 16),
    "interleaved": job(SMALL, {"pp": 2, "dp": 4, "schedule": "interleaved", "interleave": 2}, 16),
    "zb-h1": job(SMALL, {"pp": 2, "dp": 4, "schedule": "zb-h1"}, 16),
    "zb-h1-recomputed": job(SMALL, {"pp": 2, "tp": 2, "dp": 2, "schedule": "zb-h1", "recompute": "full"}, 16),
    "zbv": job(SMALL, {"pp": 2, "dp": 4, "schedule": "zbv"}, 16),
    "dualpipev": job(SMALL, {"pp": 2, "dp": 4, "schedule": "dualpipev"}, 16),
    "tied-pp": job({**SMALL, "tied_embeddings": True}, {"pp": 2, "dp": 4}, 16),
    "tied-pp-zero-3": job({**SMALL, "tied_embeddings": True}, {"pp": 2, "dp": 4, "zero": 3}, 16),
    "ep-tp": job(MIXTURE, {"tp": 2, "dp": 4, "ep": 4}, 8),
    "ep-split": job(WIDE, {"tp": 2, "dp": 4, "ep": 2, "expert_tp": 2}, 8),
    "ep-tp-plain": job(WIDE, {"tp": 2, "dp": 4, "ep": 4, "expert_tp": 1, "sequence_parallel": False}, 8),
    "ep-split-plain": job(
        WIDE, {"tp": 2, "dp": 4, "ep": 2, "expert_tp": 2, "sequence_parallel": False, "recompute": "full"}, 8
    ),
    "learned-positions": job(
        {**SMALL, "positions": "learned", "norm": "layernorm", "mlp_bias": True}, {"tp": 2, "dp": 4}, 8
    ),
    "few-kv-heads": job({**SMALL, "kv_heads": 2}, {"tp": 4, "cp": 2}, 4),
    "ep-deduplicated": job(
        WIDE,
        {"dp": 16, "ep": 16, "dispatch": "deduplicated"}, 16, nodes=2,
    ),
    "everything": job(SMALL, {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "zero": 2}, 8, nodes=2),
    "latent-tp-plain": job(LATENT, {"tp": 2, "dp": 4, "sequence_parallel": False}, 8),
    "latent-tp-selective": job(LATENT, {"tp": 2, "dp": 4, "recompute": "selective"}, 8),
    "latent-tp-recomputed": job(FULL_QUERIES, {"tp": 2, "dp": 4, "recompute": "full"}, 8),
    "full-queries-plain": job(FULL_QUERIES, {"tp": 2, "dp": 4, "sequence_parallel": False}, 8),
    "latent-ring": job(LATENT, {"cp": 4, "dp": 2}, 4),
    "latent-all-gather": job(LATENT, {"cp": 4, "dp": 2, "context_method": "all-gather"}, 4),
    "some-windows-ulysses": job(
        {**SMALL, "sliding_window": 64, "sliding_window_every": 2}, {"cp": 4, "dp": 2, "context_method": "ulysses"}, 4
    ),
    "window-all-gather": job(
        {**SMALL, "sliding_window": 96}, {"cp": 4, "dp": 2, "context_method": "all-gather"}, 4
    ),
    "latent-ulysses": job(LATENT, {"cp": 4, "dp": 2, "context_method": "ulysses", "recompute": "selective"}, 4),
    "recompute": job(SMALL, {"tp": 2, "dp": 4, "recompute": "full"}, 8),
    "recompute-shared": job(
        {**MIXTURE, "moe": {**MIXTURE["moe"], "shared_ffn": 128}}, {"tp": 2, "dp": 4, "ep": 4, "recompute": "full"}, 8
    ),
    "recompute-gathered": job(MIXTURE, {"dp": 8, "ep": 4, "zero": 1, "recompute": "full"}, 8),
    "recompute-selective": job(SMALL, {"tp": 2, "dp": 4, "recompute": "selective"}, 8),
}  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_bytes_of_every_dimension_are_as_planned(case: str) -> None:
    found = dry_run({**QUICK, **SLOW}[case])
    assert differing(found, memory=False) == []
    assert not dist.is_initialized()


TUNED: dict[str, dict[str, Any]] = {
    "adapters": {"adapters": {"rank": 8}},
    "parts": {"trained": ["layers.1", "head"]},
    "norms": {"trained": ["norms"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("tuning", TUNED)
@pytest.mark.parametrize(
    "strategy",
    [{"tp": 2, "overlap": {"tp": True}}, {"tp": 2, "recompute": "full"}, {"tp": 2, "sequence_parallel": False}],
    ids=["overlapped", "recomputed", "plain"],
)
@pytest.mark.parametrize("model", [DEEPER, LATENT, FULL_QUERIES], ids=["plain", "latent", "full-queries"])
def test_bytes_of_what_is_tuned_are_as_planned(model: dict[str, Any], strategy: dict[str, Any], tuning: str) -> None:
    """Of tensor parallelism: adapters send narrow vectors, and inputs that no gradient reads are not gathered again."""
    wide = {**model, "layers": 24, "hidden": 256}
    found = dry_run(job(wide, {**strategy, "dp": 4}, 4, **TUNED[tuning]))
    assert [line for line in differing(found, memory=False) if line.startswith("tp")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "stage"),
    [({"dp": 4, "zero": 3}, 0), ({"dp": 4, "zero": 3}, 1), ({"tp": 2, "dp": 2, "recompute": "full"}, 1)],
    ids=["below", "sharded", "split"],
)
def test_each_stage_sends_what_its_own_layers_need(strategy: dict[str, Any], stage: int) -> None:
    """The layers of the first stage are frozen, and so is half of the second, through which no gradient flows."""
    wide = {**DEEPER, "layers": 48, "hidden": 256}
    planned = job(wide, {**strategy, "pp": 2}, 16, trained=["layers.36-47"])
    found = dry_run(planned, rank=rank_at(planned.strategy, {"pp": stage}))
    assert differing(found, memory=False) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 1])
def test_each_stage_attends_as_its_own_layers_do(stage: int) -> None:
    """Of eight layers the last attends to all keys, the others have windows: FLOPs of both stages are as planned."""
    model = {**SMALL, "layers": 8, "hidden": 256, "ffn": 512, "sliding_window": 64, "sliding_window_every": 8}
    planned = job(model, {"pp": 2, "dp": 4}, 16, seq=1024)
    found = dry_run(planned, rank=rank_at(planned.strategy, {"pp": stage}))
    assert differing(found, memory=False) == []


# -- memory: of real models ---------------------------------------------------------------------------

LLAMA = {
    "zero-1": job("llama3-8b", {"dp": 8, "zero": 1}, 16, seq=2048),
    "zero-2": job("llama3-8b", {"dp": 8, "zero": 2}, 16, seq=8192),
    "zero-3": job("llama3-8b", {"dp": 8, "zero": 3}, 16, seq=8192),
    "one microbatch": job("llama3-8b", {"dp": 8, "zero": 3}, 8, seq=8192),
    "hybrid": job("llama3-8b", {"dp": 16, "zero": 3, "shard_group": 8}, 32, nodes=2, seq=8192),
    "zero-0": job("llama3-8b", {"tp": 2, "dp": 4}, 8, seq=4096),
    "tp-plain": job("llama3-8b", {"tp": 8, "sequence_parallel": False}, 4, seq=8192),
    "cp-ring": job("llama3-8b", {"cp": 8, "zero": 1}, 2, seq=16384),
    "cp-all-gather": job("llama3-8b", {"cp": 8, "zero": 1, "context_method": "all-gather"}, 2, seq=16384),
    "cp-ulysses": job("llama3-8b", {"cp": 8, "zero": 1, "context_method": "ulysses"}, 2, seq=16384),
    "pp": job("llama3-8b", {"pp": 4, "dp": 2, "zero": 1}, 16, seq=4096),
    "pp-one-microbatch": job("llama3-8b", {"pp": 4, "dp": 2, "zero": 1}, 2, seq=4096),
    "gpipe": job("llama3-8b", {"pp": 4, "dp": 2, "zero": 1, "schedule": "gpipe"}, 16, seq=4096),
    "zb-h1-recomputed": job(
        "llama3-8b", {"pp": 4, "dp": 2, "zero": 1, "schedule": "zb-h1", "recompute": "full"}, 32, seq=8192
    ),
    "fp8": job("llama3-8b", {"dp": 8, "zero": 3}, 8, seq=8192, precision="fp8"),
    "fp8-selective": job(
        "llama3-8b", {"pp": 4, "dp": 2, "recompute": "selective"}, 8, seq=4096, precision="fp8-blockwise"
    ),
    "offload-optimizer": job("llama3-8b", {"dp": 8, "zero": 1, "offload": {"optimizer": 0.5}}, 16, seq=8192),
    "offload-activations": job("llama3-8b", {"dp": 8, "zero": 1, "offload": {"activations": 1.0}}, 16, seq=8192),
    "offload-all": job(
        "llama3-8b",
        {"dp": 8, "zero": 3, "offload": {"optimizer": 1.0, "weights": 1.0, "gradients": 1.0}},
        16,
        seq=8192,
    ),
    "zb-2p": job("llama3-8b", {"pp": 4, "dp": 2, "zero": 1, "schedule": "zb-2p"}, 16, seq=4096),
    "dualpipev": job("llama3-8b", {"pp": 4, "dp": 2, "zero": 1, "schedule": "dualpipev"}, 32, seq=4096),
    "ep": job("mixtral-8x7b", {"dp": 8, "ep": 8, "zero": 1}, 16, seq=2048),
    "ep-tp": job("mixtral-8x7b", {"tp": 2, "dp": 4, "ep": 4, "zero": 1}, 8, seq=4096),
    "latent-tp": job("deepseek-v2-lite", {"tp": 2, "dp": 4, "ep": 4, "zero": 1}, 8, seq=4096),
    "latent-selective": job(
        "deepseek-v2-lite", {"tp": 2, "dp": 4, "ep": 4, "zero": 1, "recompute": "selective"}, 8, seq=4096
    ),
    "latent-ring": job("deepseek-v2-lite", {"cp": 4, "dp": 2, "ep": 8, "zero": 1}, 4, seq=8192),
    "window": job("mistral-7b", {"dp": 8, "zero": 1}, 8, seq=16384),
    "recompute": job("llama3-8b", {"dp": 8, "zero": 1, "recompute": "full"}, 16, seq=8192),
    "recompute-some": job(
        "llama3-8b", {"pp": 4, "dp": 2, "zero": 1, "recompute": "full", "recompute_layers": 6}, 16, seq=8192
    ),
    "recompute-some-interleaved": job(
        "llama3-8b",
        {
            "pp": 4,
            "dp": 2,
            "zero": 1,
            "schedule": "interleaved",
            "interleave": 2,
            "recompute": "full",
            "recompute_layers": 4,
        },
        16,
        seq=4096,
    ),
}


@pytest.mark.slow
def test_an_8b_model_on_1024_ranks_is_as_planned() -> None:
    found = dry_run(job("llama3-8b", {"tp": 8, "zero": 1}, 1024, nodes=128, seq=8192))
    assert differing(found, memory=True) == []
    assert found.coordinates == {"tp": 0, "cp": 0, "dp": 0, "pp": 0}


@pytest.mark.slow
@pytest.mark.parametrize("case", LLAMA)
def test_memory_of_every_dimension_is_as_planned(case: str) -> None:
    found = dry_run(LLAMA[case])
    assert differing(found, memory=True) == []


@pytest.mark.slow
def test_an_8b_model_on_1024_ranks_takes_less_than_a_minute_and_4_gib() -> None:
    arguments = "dryrun --model llama3-8b --cluster dgx-h100:128 --tp 8 --zero 1 --global-batch 1024 --seq 8192 --json"
    code = f"""
import resource, sys, time
from shardwise.cli.main import main
assert main({arguments.split()!r}) == 0
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["ok"] is True
    seconds, gibibytes = map(float, ran.stderr.split()[-2:])
    assert seconds < 60
    assert gibibytes < 4


# -- extension ----------------------------------------------------------------------------------------


def equal(extended: DryRun, full: DryRun) -> None:
    def lines(found: DryRun) -> dict[Any, Any]:
        return {one.line: pytest.approx((one.count, one.bytes)) for one in found.calls}

    assert lines(extended) == {one.line: (one.count, one.bytes) for one in full.calls}
    assert extended.flops == pytest.approx(full.flops)
    assert extended.peak_bytes == pytest.approx(full.peak_bytes)


EXTENDED = {
    "layers": job(DEEPER, {"dp": 8, "zero": 3}, 8),
    "microbatches": job({**SMALL, "layers": 1}, {"dp": 8, "zero": 3}, 48),
    "zero-3": job(DEEPER, {"dp": 8, "zero": 3}, 40),
    "zero-0": job(DEEPER, {"dp": 8}, 40),
    "tp": job(DEEPER, {"tp": 2, "dp": 4, "zero": 2}, 20),
    "pp": job({**SMALL, "layers": 12}, {"pp": 2, "dp": 4, "zero": 1}, 48),
    "interleaved": job({**SMALL, "layers": 24}, {"pp": 2, "dp": 4, "schedule": "interleaved", "interleave": 2}, 64),
    "zb-h1": job({**SMALL, "layers": 12}, {"pp": 2, "dp": 4, "schedule": "zb-h1"}, 48),
    "zbv": job({**SMALL, "layers": 8}, {"pp": 4, "dp": 2, "schedule": "zbv"}, 40),
    "cp": job(DEEPER, {"cp": 4, "dp": 2, "zero": 2}, 8),
    "recompute": job(DEEPER, {"dp": 8, "zero": 3, "recompute": "full"}, 32),
    "recompute-some": job({**SMALL, "layers": 12}, {"dp": 8, "recompute": "full", "recompute_layers": 6}, 8),
    "two-kinds": job(
        {**MIXTURE, "layers": 11, "moe": {**MIXTURE["moe"], "dense_layers": 5}}, {"dp": 8, "ep": 4, "zero": 1}, 8
    ),
}
EXTENDED_QUICK = ("layers",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [*EXTENDED_QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in EXTENDED if one not in EXTENDED_QUICK)],
)
def test_a_few_layers_and_microbatches_give_the_figures_of_all(case: str) -> None:
    extended = dry_run(EXTENDED[case])
    equal(extended, dry_run(EXTENDED[case], rank=extended.rank, full=True))


@pytest.mark.slow
def test_a_few_layers_of_a_real_model_give_the_figures_of_all() -> None:
    large = job("llama3-8b", {"tp": 8, "zero": 1}, 512, nodes=128, seq=8192)
    equal(dry_run(large), dry_run(large, full=True))


# -- routing ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_skewed_load_makes_more_rows_arrive() -> None:
    mixture = job(MIXTURE, {"dp": 8, "ep": 8}, 8)
    even, skewed = dry_run(mixture), dry_run(mixture, skew=3.0)
    assert skewed.peak_bytes > even.peak_bytes
    assert skewed.flops["products"] > even.flops["products"]

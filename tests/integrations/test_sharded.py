"""Real processes over gloo that shard: FSDP1 and 2 of Accelerate and the Trainer, networks that transformers splits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integrations.ranks import launched, run_ranks
from integrations.tiny import network
from shardwise import analyze
from shardwise.api.analysis import AnalysisResult
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.interop.jobs import read_job
from shardwise.run.metrics.lines import read_lines
from shardwise.spec.stack import stack_from

pytestmark = pytest.mark.slow

FOUR = ("hybrid", "not-split", "trainer-tp")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launched("sharded_worker.py", folder, *TWO, "lightning-tp", "lightning-not-split")
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    launched("sharded_worker.py", folder, *FOUR, processes=4)
    return folder


def noted(folder: Path, case: str) -> dict[str, Any]:
    """What a rank has noted, the same on all."""
    files = sorted(folder.glob(f"{case}-rank-[0-9].json"))
    first, *others = (json.loads(one.read_text(encoding="utf-8")) for one in files)
    assert others and all((one["job"], one["why"]) == (first["job"], first["why"]) for one in others)
    return dict(first)


def recorded(folder: Path, case: str) -> Path:
    return folder / case / ("shardwise" if case.startswith("trainer") else "")


CASES: dict[str, dict[str, Any]] = {
    "plain": {"zero": 0},
    "fsdp2": {"zero": 3, "accumulate": "local"},
    "fsdp2-each-batch": {"zero": 3, "accumulate": "sharded"},
    "fsdp2-kept": {"zero": 3, "keep_parameters": True, "accumulate": "local"},
    "fsdp2-bf16": {"zero": 3, "accumulate": "local"},
    "fsdp2-recomputed": {"zero": 3, "accumulate": "local", "recompute": "full", "offload": {"activations": 1}},
    "fsdp1": {"zero": 3, "accumulate": "local"},
    "fsdp1-zero2": {"zero": 2, "accumulate": "local", "recompute": "full"},
    "fsdp1-bf16": {"zero": 3, "accumulate": "local"},
    "fsdp1-by-hand": {"zero": 2, "accumulate": "local"},
    "tp": {"zero": 0, "tp": 2, "sequence_parallel": False},
    "trainer-plain": {"zero": 0},
    "trainer-kept": {"zero": 3, "keep_parameters": True, "accumulate": "local", "recompute": "full"},
    "trainer-fsdp1": {"zero": 3, "accumulate": "local"},
    "trainer-loaded": {"zero": 3, "accumulate": "sharded"},
    "hybrid": {"zero": 3, "shard_group": 2, "accumulate": "local"},
    "trainer-tp": {"zero": 3, "tp": 2, "sequence_parallel": False},
}


TWO = [case for case in CASES if case not in FOUR]


def equivalent(case: str, world: int) -> AnalysisResult:
    """The price of the job that somebody would write who knows the run."""
    given, rows = CASES[case], 2 if case.startswith("trainer") else 4
    ranks, bf16 = world // given.get("tp", 1), case.endswith("bf16")
    stack = stack_from("accelerate")
    if bf16:
        stack = replace(stack, name="accelerate-changed", gradient_reduce="bf16")
    training = {"seq": 16, "global_batch": rows * 2 * ranks, "precision": "bf16-fp32-grads" if bf16 else "fp32"}
    return analyze(
        {
            "model": model_from_hf_config(network().config.to_dict()).to_dict(),
            "cluster": f"laptop:{world}",
            "strategy": {**given, "dp": ranks, "microbatch": rows},
            "training": {**training, "optimizer": "adamw", "attention": "flash"},
            "stack": {name: value for name, value in stack.to_dict().items() if name != "source"},
        }
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_runs_and_has_the_price_of_that_job(case: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue("four" if case in FOUR else "two")
    found, wanted = noted(folder, case), equivalent(case, 4 if case in FOUR else 2)
    job = read_job(recorded(folder, case) / "job.yaml")
    assert found["job"] == job.to_dict()
    assert job.strategy.to_dict() == wanted.job.strategy.to_dict()
    assert (job.training, replace(job.model, name=wanted.job.model.name)) == (wanted.job.training, wanted.job.model)
    record = json.loads((recorded(folder, case) / "shardwise.json").read_text(encoding="utf-8"))
    assert record["predicted"]["predicted_seconds"] == pytest.approx(wanted.predicted_seconds)
    assert record["measured"]["tokens_per_step"] == record["predicted"]["tokens_per_step"] == job.tokens_per_step
    lines = list(read_lines(recorded(folder, case) / "metrics.jsonl"))
    assert [one["step"] for one in lines] == list(range(1, 6))


@pytest.mark.parametrize("case", [one for one in TWO if "bf16" not in one and one != "tp"])
def test_watching_leaves_what_is_learned_as_it_is(case: str, two: Path) -> None:
    alike = "trainer-plain" if case.startswith("trainer") else "plain"
    assert noted(two, case)["losses"] == pytest.approx(noted(two, alike)["losses"], abs=1e-5)


def test_gradients_are_whole_between_microbatches_unless_every_batch_is_reduced(two: Path) -> None:
    assert not noted(two, "fsdp2")["reduced"] and noted(two, "fsdp2-each-batch")["reduced"]


def test_memory_is_near_what_is_predicted(two: Path) -> None:
    """Of fp32, whose kernels on a CPU keep what those of a GPU keep."""
    for case in ("fsdp2", "fsdp2-each-batch", "fsdp2-kept", "fsdp1", "fsdp1-zero2", "trainer-kept", "trainer-loaded"):
        record = json.loads((recorded(two, case) / "shardwise.json").read_text(encoding="utf-8"))
        assert record["measured"]["memory_bytes"] == pytest.approx(record["predicted"]["tensor_bytes"], rel=0.2), case


def test_fsdp_that_does_not_shard_is_told(two: Path) -> None:
    record = json.loads((two / "plain" / "shardwise.json").read_text(encoding="utf-8"))
    assert any(one.startswith("FSDP is asked for, but Accelerate does not shard here") for one in record["notes"])
    assert noted(two, "plain")["kind"] == "MULTI_CPU"
    assert noted(two, "fsdp2")["kind"] == noted(two, "fsdp1")["kind"] == "FSDP"


def test_a_mesh_that_splits_no_weights_has_no_price(four: Path) -> None:
    found = noted(four, "not-split")
    assert found["job"] is None
    assert found["why"].startswith("model: the mesh has 2 tensor-parallel ranks, but no weight of the network is split")


def test_a_lightning_module_is_priced_as_it_is_split(two: Path) -> None:
    job = read_job(two / "lightning-tp" / "job.yaml")
    assert (job.strategy.tp, job.strategy.data_parallel, job.strategy.zero, job.sequences) == (2, 1, 0, 4)
    record = json.loads((two / "lightning-tp" / "shardwise.json").read_text(encoding="utf-8"))
    assert record["measured"]["tokens_per_step"] == record["predicted"]["tokens_per_step"] == 4 * 16
    record = json.loads((two / "lightning-not-split" / "shardwise.json").read_text(encoding="utf-8"))
    assert "no weight of the network is split over them; split it in configure_model" in record["not_priced"]


def test_an_uncaught_misfit_ends_every_rank(tmp_path: Path) -> None:
    done = run_ranks("sharded_worker.py", tmp_path, "stopped")
    assert done.returncode == 1 and not (tmp_path / "stopped").exists()
    told = [one for one in done.stderr.splitlines() if "DoesNotFit: strategy: a device needs" in one]
    assert len(told) == 2  # by either rank, with nothing hanging behind

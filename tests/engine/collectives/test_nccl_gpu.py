"""Several ranks on one GPU over NCCL, which takes them for ranks of as many hosts: schedules, and whole layouts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing

from engine.collectives.schedule_cases import Result, run_all
from required import require
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.measure.reference import sample_batch
from shardwise.spec import Job

DENSE = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 128, "max_seq": 64}
EXPERTS = {**DENSE, "moe": {"experts": 4, "top_k": 2, "ffn": 64}}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero-0": (DENSE, {"dp": 4}),
    "zero-1": (DENSE, {"dp": 4, "zero": 1}),
    "zero-3": (DENSE, {"dp": 4, "zero": 3}),
    "hybrid": (DENSE, {"dp": 4, "zero": 3, "shard_group": 2}),
    "tp": (DENSE, {"dp": 2, "tp": 2}),
    "overlapped tp": (DENSE, {"dp": 1, "tp": 4, "overlap": {"tp": True}}),
    "overlapped tp and zero-3": (DENSE, {"dp": 2, "tp": 2, "zero": 3, "overlap": {"tp": True}}),
    "pp": (DENSE, {"dp": 2, "pp": 2, "schedule": "zb-h1"}),
    "cp": (DENSE, {"dp": 2, "cp": 2}),
    "ulysses": (DENSE, {"dp": 2, "cp": 2, "context_method": "ulysses"}),
    "tp and pp": (DENSE, {"dp": 1, "tp": 2, "pp": 2}),
    "ep": (EXPERTS, {"dp": 4, "ep": 2}),
    "overlapped ep": (EXPERTS, {"dp": 4, "ep": 2, "overlap": {"ep": True}}),
    "a named collective": (DENSE, {"dp": 4, "collective": "halving_doubling"}),
}
WORLD, STEPS = 4, 3


@pytest.fixture(autouse=True)
def _gpu() -> None:
    require("cuda", None if torch.cuda.is_available() else "needs a GPU")


def on_one_gpu(folder: Path, function: Any, *arguments: Any) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, str(folder / "meeting"), answers, function, arguments))
        for rank in range(WORLD)
    ]
    for one in ranks:
        one.start()
    found = dict(answers.get(timeout=240) for _ in ranks)
    for one in ranks:
        one.join()
    return [found[rank] for rank in range(WORLD)]


def _rank(rank: int, meeting: str, answers: Any, function: Any, arguments: tuple[Any, ...]) -> None:
    # NCCL refuses two ranks of one host on one GPU, and knows hosts by this.
    os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NVLS_ENABLE="0")
    with process_group(rank, WORLD, meeting, device="cuda"):
        answers.put((rank, function(*arguments)))


def test_every_schedule_runs_on_gpu_tensors(tmp_path: Path) -> None:
    results: list[Result] = on_one_gpu(tmp_path, run_all, 7, False, "cuda")
    assert not any(one.wrong for one in results), [one.wrong for one in results]
    assert len({one.bits[0] for one in results}) == 1


def losses(jobs: dict[str, Job]) -> dict[str, list[float]]:
    found = {}
    for name, job in jobs.items():
        engine = Engine(job, device="cuda")
        share = (engine.mesh.rank("dp"), engine.mesh.size("dp"))
        batches = [sample_batch(job, step, 0, "cuda").share(*share) for step in range(STEPS)]
        found[name] = [float(engine.step(batch).loss) for batch in batches]
    return found


def job(model: dict[str, Any], strategy: dict[str, Any], devices: int) -> Job:
    training = {"global_batch": 8, "seq": 32, "precision": "fp32"}
    return Job.from_dict(
        {
            "model": model,
            "cluster": f"laptop:{devices}",
            "strategy": {"microbatch": 1, **strategy},
            "training": training,
        }
    )


def test_layouts_have_the_loss_of_one_rank(tmp_path: Path) -> None:
    alone = {name: job(model, {}, 1) for name, (model, _) in LAYOUTS.items()}
    with process_group(0, 1, str(tmp_path / "alone"), device="cuda"):
        meant = losses(alone)
    divided = {name: job(model, strategy, WORLD) for name, (model, strategy) in LAYOUTS.items()}
    for found in on_one_gpu(tmp_path, losses, divided):
        for name in LAYOUTS:
            assert found[name] == pytest.approx(meant[name], rel=2e-5), name

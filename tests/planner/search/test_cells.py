"""Cells of the tables that a search prices: each equals its strategy priced alone, and runs where the matrix says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random

import numpy as np
import pytest

from cost.sweep.test_sweep import table_of
from planner.cases import MODELS, NETWORKS, job_of
from shardwise.collectives import CollectiveKind, collective_cost
from shardwise.cost.memory.device import device_memories, peak_memory
from shardwise.cost.step.prediction import predict
from shardwise.cost.sweep.price import TablePiece, TablePricer
from shardwise.layout.network import network
from shardwise.planner.candidate import job_with
from shardwise.planner.constraints import Allowed, Constraints
from shardwise.planner.search.space import Space
from shardwise.planner.search.supported import Supported, findings_of
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job

# Every model and every network twice, with batches in sequences and in tokens, several formats, stacks, optimizers.
CASES = [
    ("dense", "two", 48, "bf16", "adamw", "shardwise"),
    ("dense", "torus", "1M-tokens", "bf16-fp32-grads", "muon", "megatron-core"),
    ("tied", "three", 64, "bf16", "sgd", "shardwise"),
    ("tied", "pcie", 96, "fp8", "adamw", "megatron-core@2022"),
    ("window", "h100", "2M-tokens", "fp8", "adamw", "megatron-core"),
    ("window", "flat", 32, "fp16", "adamw", "nanotron"),
    ("experts", "h100", 64, "bf16", "adamw", "megatron-core"),
    ("experts", "torus", 32, "bf16-fp32-grads", "adamw", "shardwise"),
    ("latent", "three", "1M-tokens", "bf16", "muon", "shardwise"),
    ("latent", "pcie", 48, "fp8", "adamw", "torchtitan"),
    ("dense", "h100", 48, "bf16-fp32-grads", "adamw", "accelerate"),
]


@cache
def priced(number: int) -> tuple[Job, tuple[TablePiece, ...]]:
    """A search over random degrees with everything that can be chosen for them, offload included."""
    model, cluster, batch, precision, optimizer, stack = CASES[number]
    random = Random(number)
    job = job_of(MODELS[model], NETWORKS[cluster], batch, seq=random.choice((2048, 4096)), precision=precision,
                 optimizer=optimizer)  # fmt: skip
    job = Job.from_dict({"model": job.model, "cluster": job.cluster, "stack": stack}).unchecked(training=job.training)
    allowed = {"pp": Allowed(tuple(random.sample((1, 2, 4, 8), 2)))}
    if job.model.moe:
        allowed = {"pp": Allowed((random.choice((1, 2, 4)),)), "tp": Allowed(tuple(random.sample((1, 2, 4), 2))),
                   "ep": Allowed(tuple(random.sample((1, 2, 4, 8), 2)))}  # fmt: skip
    space = Space(job, Constraints(allowed), any_priced=True)
    return job, tuple(TablePricer(job).pieces(space.groups()))


def cells(number: int, count: int) -> Iterator[tuple[TablePiece, int, int, Job]]:
    """``count`` random cells, and the job of each."""
    job, pieces = priced(number)
    random = Random(count)
    for _ in range(count):
        piece = random.choice(pieces)
        column, row = (random.randrange(size) for size in piece.memory_bytes.shape)
        yield piece, column, row, job_with(job, piece.strategy(column, row), int(piece.sequences[row]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_cell_equals_its_strategy_priced_alone_and_runs_where_that_does(number: int) -> None:
    for piece, column, row, job in cells(number, 30):
        host = float(np.broadcast_to(piece.host_bytes, piece.memory_bytes.shape)[column, row])
        seconds = piece.step_seconds(np.array([row]))[column, 0]
        assert (seconds, piece.memory_bytes[column, row], host) == table_of(job)
        assert seconds == pytest.approx(predict(job).step_seconds, rel=1e-9)
        assert seconds >= piece.pipeline_seconds[row]
        assert piece.memory_bytes[column, row] == pytest.approx(peak_memory(job).total, rel=1e-9)
        assert host == pytest.approx(max(one.host for one in device_memories(job)), rel=1e-9, abs=1e-3)
    check_support(number)


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_some_rows_of_a_piece_take_as_long_as_among_all(number: int) -> None:
    random = Random(number)
    for piece in random.sample(priced(number)[1], 5):
        rows = np.array(sorted(random.sample(range(len(piece.sequences)), min(7, len(piece.sequences)))))
        assert np.array_equal(piece.step_seconds(rows), piece.step_seconds()[:, rows])


def check_support(number: int) -> None:
    """What runs according to the table is what runs according to the support matrix."""
    job, _ = priced(number)
    both = [(any_priced, Supported(job, any_priced=any_priced)) for any_priced in (False, True)]
    seen = set()
    for piece, column, row, one in cells(number, 200):
        for any_priced, supported in both:
            allowed = supported.allowed(piece)
            runs = allowed is None or bool(allowed[column, row])
            assert runs == (not findings_of(one, any_priced=any_priced))
            seen.add((any_priced, runs))
    assert {(False, False), (True, True)} <= seen


@pytest.mark.parametrize("name", ["gb200-nvl72:4", "dgx-h100:4", "tpu-v5p:4x4x4", "two-datacenters"])
def test_a_collective_among_others_costs_what_it_costs_alone(name: str) -> None:
    """For several levels, the algorithms that other sizes choose are no choice for this one."""
    sizes = 10 ** np.random.default_rng(0).uniform(2, 10, 60)
    for kind in CollectiveKind:
        together = collective_cost(kind, sizes, network(cluster_from(name)), "auto").seconds
        alone = [collective_cost(kind, float(size), network(cluster_from(name)), "auto").seconds for size in sizes]
        assert together.tolist() == alone

"""Packed documents of which answers alone count: the same run on every layout, and as document by document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.workers import on_ranks
from shardwise.run.data.order import IGNORED, rows_of
from shardwise.run.data.run_data import mixtures_of
from shardwise.spec import Job
from training.runs import job_of, lines, run, whole, write_answers

RUN: dict[str, Any] = {"steps": 3, "evaluation": {"interval": 3, "batches": 8}}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_answers(tmp_path_factory.mktemp("data") / "answers")


@pytest.fixture(scope="module")
def alone(answers: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, whole(run(tuning(answers), folder))


def tuning(answers: str, devices: int = 1, **strategy: Any) -> Job:
    """Packed sequences in which most documents are whole."""
    job = job_of(answers, devices, run=RUN, **strategy)
    return replace(job, training=replace(job.training, seq=64))


def figures(folder: Path) -> tuple[list[float], list[float]]:
    recorded = lines(folder)
    return tuple([one[name] for one in recorded if name in one] for name in ("loss", "validation_loss"))  # type: ignore[return-value]


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"dp": 2}),
    (2, {"dp": 2, "zero": 3, "microbatch": 2}),
    (2, {"tp": 2}),
    (2, {"pp": 2}),
    (2, {"cp": 2}),
    pytest.param(2, {"cp": 2, "context_method": "ulysses"}, marks=pytest.mark.slow),
    pytest.param(4, {"dp": 2, "cp": 2, "zero": 2}, marks=pytest.mark.slow),
    pytest.param(8, {"dp": 2, "tp": 2, "pp": 2}, marks=pytest.mark.slow),
]  # type: ignore[list-item]


@pytest.mark.parametrize(("devices", "strategy"), LAYOUTS, ids=str)
def test_every_layout_trains_as_one_process(
    devices: int, strategy: dict[str, Any], answers: str, alone: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Losses, the loss of held-out data and weights after some steps; ranks hold unlike numbers of labels."""
    job = tuning(answers, devices, **strategy)
    found, (folder, wanted) = whole(run(job, tmp_path)), alone
    for mine, its in zip(figures(tmp_path), figures(folder)):
        assert len(mine) == len(its) > 1 and np.allclose(mine, its, rtol=1e-5)
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert np.abs(tensor - wanted[key]).max() <= 1e-5 * max(np.abs(wanted[key]).max(), 1e-3), key


def test_ranks_hold_unlike_numbers_of_labels(answers: str, tmp_path: Path) -> None:
    """Or the test above would not tell a mean of means."""
    training, _ = mixtures_of(tuning(answers), tmp_path)
    labels = np.array([(rows_of(training, step, 8).labels != IGNORED).sum(1) for step in range(3)])
    of_ranks = labels.reshape(3, 2, 4).sum(2)
    assert (of_ranks.max(1) > 1.1 * of_ranks.min(1)).any()
    assert labels.min() < 0.8 * labels.max()


def losses_of(job: Job, folder: str) -> tuple[float, float, float, float]:
    """The loss of a global batch, packed and document by document; and of all that is held out, likewise."""
    import torch

    from shardwise.engine.engine import Engine
    from shardwise.run.data.order import Loader
    from shardwise.training.loop import batch_of, evaluate

    engine = Engine(job, seed=job.run.seed)
    [decoder] = engine.stages.values()
    training, held = mixtures_of(job, Path(folder))
    assert held is not None
    [stream] = held.streams
    each = rows_of(held, 0, stream.per_epoch)
    first = rows_of(training, 0, job.sequences)
    packed = engine.evaluate(batch_of(first, engine.device))
    loader = Loader(held, job.sequences)
    evaluated = evaluate(engine, loader, job.run.evaluation.batches)
    loader.close()

    def one_by_one(rows: Any) -> float:
        total, labels = 0.0, 0
        for row in range(len(rows.tokens)):
            for number in np.unique(rows.documents[row]):
                inside = rows.documents[row] == number
                tokens, wanted = (torch.from_numpy(of[row][inside][None]) for of in (rows.tokens, rows.labels))
                with torch.no_grad():
                    total += float(decoder(tokens, wanted))
                labels += int((wanted != IGNORED).sum())
        return total / labels

    return float(packed), one_by_one(first), evaluated, one_by_one(each)


def test_packed_documents_lose_what_they_lose_alone(answers: str, tmp_path: Path) -> None:
    """Attention and positions respect boundaries; what is held out is read once, each of its labels counts the same."""
    [(packed, apart, evaluated, held_apart)] = on_ranks(1, losses_of, tuning(answers), str(tmp_path))
    assert packed == pytest.approx(apart, rel=1e-6)
    assert evaluated == pytest.approx(held_apart, rel=1e-6)


def step_without_labels(job: Job) -> tuple[float, float, bool]:
    import torch

    from shardwise.engine.batch import Batch
    from shardwise.engine.engine import Engine

    engine = Engine(job, seed=0)
    before = [held.parameter.detach().clone() for held in engine.parameters]
    tokens = torch.ones((8, job.training.seq), dtype=torch.long)
    batch = Batch.of(tokens, torch.full_like(tokens, IGNORED))
    result = engine.forward_backward(batch)
    norm = engine.update()
    same = all(bool(torch.isfinite(held.parameter).all()) for held in engine.parameters) and len(before) > 0
    return float(result), float(norm), same


def test_a_step_without_a_label_learns_nothing_and_breaks_nothing(answers: str) -> None:
    assert on_ranks(1, step_without_labels, tuning(answers)) == [(0.0, 0.0, True)]

"""The data of a run: the shards it names, or the built-in corpus, as a mixture for training and one for evaluation."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwise.spec.job import Job
from shardwise.train.data.build import build
from shardwise.train.data.corpus import standard_library
from shardwise.train.data.mixture import Mixture
from shardwise.train.data.pair import Pair, open_pair
from shardwise.train.data.samples import Stream
from shardwise.train.data.stage import staged

CORPUS = "corpus"
_EVALUATION_SEED = 1  # is added to the run's: another order, and the same one at every evaluation


def mixtures_of(job: Job, folder: Path) -> tuple[Mixture, Mixture | None]:
    """What a run trains on, and what it evaluates on; ``folder`` keeps the built-in corpus."""
    data, seed = job.run.data, job.run.seed
    names = [Path(name) for name in data.shards] or [built_in(folder)]
    pairs = [open_pair(name) for name in staged([*names, *map(Path, data.validation)], data.stage, data.stage_limit)]
    trained, others = pairs[: len(names)], pairs[len(names) :]
    cuts = [one.documents if others else _first_held_out(one, data.held_out) for one in trained]
    training = _mixture(job, trained, [0] * len(trained), cuts, data.weights, seed)
    if not job.run.evaluation.batches:
        return training, None
    held = others or trained
    firsts, lasts = ([0] * len(held) if others else cuts), [one.documents for one in held]
    return training, _mixture(job, held, firsts, lasts, () if others else data.weights, seed + _EVALUATION_SEED)


def built_in(folder: Path) -> Path:
    """The corpus that needs no download, built by whichever process comes first; the others wait for it."""
    prefix = folder / CORPUS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{CORPUS}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not prefix.with_suffix(".idx").exists():
            build(standard_library(), prefix)
    return prefix


def _first_held_out(pair: Pair, share: float) -> int:
    """The document with which the last ``share`` of the tokens begins."""
    return int(np.searchsorted(pair.starts, (1 - share) * pair.starts[-1]))


def _mixture(
    job: Job, pairs: Sequence[Pair], firsts: Sequence[int], lasts: Sequence[int], weights: Sequence[float], seed: int
) -> Mixture:
    streams = [
        Stream(pair, job.training.seq, job.model.vocab, seed + 1000 * number, first, last)
        for number, (pair, first, last) in enumerate(zip(pairs, firsts, lasts))
    ]
    return Mixture(streams, weights or [float(one.tokens) for one in streams], seed)

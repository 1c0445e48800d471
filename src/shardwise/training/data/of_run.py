"""The data of a run: the shards it names, or the built-in corpus, as a mixture for training and one for evaluation."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.training.data.build import build
from shardwise.training.data.corpus import standard_library
from shardwise.training.data.mixture import Mixture
from shardwise.training.data.pair import Pair, Tokens, open_pair
from shardwise.training.data.samples import Stream
from shardwise.training.data.stage import require_staging, staged

CORPUS = "corpus"
_PROBED_TOKENS = 2**16  # of each part, read before a run starts: whether the vocabulary has them
_EVALUATION_SEED = 1  # is added to the run's: another order, and the same one at every evaluation


def mixtures_of(job: Job, folder: Path) -> tuple[Mixture, Mixture | None]:
    """What a run trains on, and what it evaluates on; ``folder`` keeps the built-in corpus."""
    data = job.run.data
    names = [Path(name) for name in data.shards] or [built_in(folder)]
    pairs = [open_pair(name) for name in staged([*names, *map(Path, data.validation)], data.stage, data.stage_limit)]
    return _mixtures(job, pairs[: len(names)], pairs[len(names) :])


def check_data(job: Job) -> list[str]:
    """Before a process starts: what a user should know of a run's data; raises SpecError for data it cannot use."""
    data = job.run.data
    trained = [open_pair(name) for name in data.shards] or [_to_be_built()]
    others = [open_pair(name) for name in data.validation]
    training, evaluated = _mixtures(job, trained, others)
    built = 0 if data.shards else trained[0].tokens.nbytes
    require_staging([Path(one) for one in (*data.shards, *data.validation)], built, data.stage, data.stage_limit)
    for stream in [*training.streams, *(evaluated.streams if evaluated else [])]:
        stream.known(stream.begin, stream.begin + min(stream.tokens, _PROBED_TOKENS))
    if evaluated is None or others:
        return []
    return [
        f"{stream.pair.prefix}: {stream.tokens:,} of {len(stream.pair.tokens):,} tokens are held out, one sequence:"
        f" more than run.data.held_out ({data.held_out:g}) asks for"
        for stream in evaluated.streams
        if stream.tokens > 1 + data.held_out * len(stream.pair.tokens)
    ]


def built_in(folder: Path) -> Path:
    """The corpus that needs no download, built by whichever process comes first; the others wait for it."""
    prefix = folder / CORPUS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{CORPUS}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not prefix.with_suffix(".idx").exists():
            build(standard_library(), prefix)
    return prefix


def _to_be_built() -> Pair:
    """The built-in corpus as it will be: where its documents begin, and tokens that take no memory."""
    starts = np.cumsum([0, *(path.stat().st_size + 1 for path in standard_library())])
    return Pair(Path("the built-in corpus"), np.broadcast_to(np.zeros(1, np.uint16), int(starts[-1])), starts, None)


def held_out_begin(starts: Tokens, share: float, seq: int) -> int:
    """The token with which the last ``share`` of a corpus begins, whose documents begin at ``starts``.

    That is the first token of a document, unless less than a sequence would be left on one side: with few documents
    the cut is within one of them, and what is held out is a sequence at the least.
    """
    total, document = int(starts[-1]), _first_document_held_out(starts, share)
    if min(document, total - document) > seq:
        return document
    return total - max(int(share * total), seq + 1)


def _first_document_held_out(starts: Tokens, share: float) -> int:
    return int(starts[np.searchsorted(starts, (1 - share) * starts[-1])])


def _training_end(job: Job, pair: Pair) -> int:
    """The token before which training stays."""
    share, seq = job.run.data.held_out, job.training.seq
    if job.run.data.validation:
        return len(pair.tokens)
    if not job.run.evaluation.batches:
        return _first_document_held_out(pair.starts, share)
    if len(pair.tokens) < 2 * (seq + 1):
        problem = f"has {len(pair.tokens):,} tokens, one sequence to train on and one held out need {2 * (seq + 1):,}"
        remedy = "give more data, a shorter sequence (--seq), run.data.validation, or run.evaluation.batches: 0"
        raise SpecError(f"{pair.prefix}", problem, remedy)
    return held_out_begin(pair.starts, share, seq)


def _mixtures(job: Job, trained: Sequence[Pair], others: Sequence[Pair]) -> tuple[Mixture, Mixture | None]:
    weights, seed = job.run.data.weights, job.run.seed
    ends = [_training_end(job, pair) for pair in trained]
    training = _mixture(job, [(pair, 0, end) for pair, end in zip(trained, ends)], weights, seed)
    if not job.run.evaluation.batches:
        return training, None
    held = [(pair, end, len(pair.tokens)) for pair, end in zip(trained, ends)]
    evaluated = [(pair, 0, len(pair.tokens)) for pair in others] or held
    return training, _mixture(job, evaluated, () if others else weights, seed + _EVALUATION_SEED)


def _mixture(job: Job, parts: Sequence[tuple[Pair, int, int]], weights: Sequence[float], seed: int) -> Mixture:
    streams = [
        Stream(pair, job.training.seq, job.model.vocab, seed + 1000 * number, begin, end)
        for number, (pair, begin, end) in enumerate(parts)
    ]
    return Mixture(streams, weights or [float(one.tokens) for one in streams], seed)

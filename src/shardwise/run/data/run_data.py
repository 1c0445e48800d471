"""The data of a run: the shards it names, or the built-in corpus, as a mixture for training and one for evaluation."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.run.data.build import build
from shardwise.run.data.order import Mixture, Stream
from shardwise.run.data.packing import PackedStream
from shardwise.run.data.sources import standard_library
from shardwise.run.data.token_files import TokenFiles, Tokens, open_pair, pairs_of_preferences
from shardwise.run.storage.place import Place, absolute, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes

CORPUS = "corpus"
_PROBED_TOKENS = 2**16  # of each part, compared with the vocabulary before a run starts
_EVALUATION_SEED = 1  # added to the run's: another order, the same at every evaluation
_SUFFIXES = (".bin", ".mask", ".idx")  # the index last: it completes the pair
_MEMORY = Path("/dev/shm")
_COPY_BYTES = 2**23


def mixtures_of(job: Job, folder: Path) -> tuple[Mixture, Mixture | None]:
    """What a run trains and evaluates on; ``folder`` keeps the built-in corpus."""
    data = job.run.data
    names = _places(job, data.shards) or [builtin_corpus(folder)]
    here = staged([*names, *_places(job, data.validation)], data.stage, data.stage_limit)
    pairs = [open_pair(name, data.cache) for name in here]
    return _mixtures(job, _sources(job, pairs[: len(names)]), _sources(job, pairs[len(names) :]))


def check_data(job: Job) -> list[str]:
    """Checks a run's data before a process starts: notes for the user; raises SpecError for unusable data."""
    data = job.run.data
    shards, validation = _places(job, data.shards), _places(job, data.validation)
    trained = [open_pair(name, data.cache) for name in shards] or [_to_be_built()]
    others = [open_pair(name, data.cache) for name in validation]
    training, evaluated = _mixtures(job, _sources(job, trained), _sources(job, others))
    built = 0 if data.shards else trained[0].tokens.nbytes
    require_staging([*shards, *validation], built, data.stage, data.stage_limit)
    for stream in [*training.streams, *(evaluated.streams if evaluated else [])]:
        stream.checked(stream.begin, stream.begin + min(stream.tokens, _PROBED_TOKENS))
    packed = [f"{one.pair.prefix}: {one.summary}" for one in training.streams if isinstance(one, PackedStream)]
    if evaluated is None or others:
        return packed
    return packed + [
        f"{stream.pair.prefix}: {stream.tokens:,} of {len(stream.pair.tokens):,} tokens are held out, one sequence:"
        f" more than run.data.held_out ({data.held_out:g}) asks for"
        for stream in evaluated.streams
        if not isinstance(stream, PackedStream) and stream.tokens > 1 + data.held_out * len(stream.pair.tokens)
    ]


def _places(job: Job, names: Sequence[str]) -> list[Place]:
    """The places of some pairs, two for each of preferences; a store may take as long to answer as a step may."""
    places = [place_of(name, job.run.timeouts.step) for name in names]
    return [pair for place in places for pair in pairs_of_preferences(place)] if _prefers(job) else places


def _prefers(job: Job) -> bool:
    return job.training.task == "dpo"


@dataclass(frozen=True)
class _Source:
    """A pair of files, or two of preferences; ``packed`` if its documents stay whole."""

    pairs: tuple[TokenFiles, ...]
    packed: bool


def _sources(job: Job, pairs: Sequence[TokenFiles]) -> list[_Source]:
    if _prefers(job):
        both = [_Source((chosen, rejected), packed=True) for chosen, rejected in zip(pairs[::2], pairs[1::2])]
        for chosen, rejected in (source.pairs for source in both):
            if chosen.documents != rejected.documents:
                problem = f"has {rejected.documents:,} documents, and there are {chosen.documents:,} chosen ones"
                raise SpecError(str(rejected.prefix), problem, "build them again: data build")
        return both
    wanted, tuned = job.run.data.packing, job.training.task == "sft"
    return [
        _Source((pair,), wanted == "packed" or (wanted == "auto" and (tuned or pair.mask is not None)))
        for pair in pairs
    ]


def builtin_corpus(folder: Path) -> Path:
    """The corpus that needs no download; the first process builds it while the others wait."""
    prefix = folder / CORPUS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{CORPUS}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not prefix.with_suffix(".idx").exists():
            build(standard_library(), prefix)
    return prefix


def _to_be_built() -> TokenFiles:
    """The built-in corpus as it will be: its document boundaries, and tokens that take no memory."""
    starts = np.cumsum([0, *(path.stat().st_size + 1 for path in standard_library())])
    tokens = np.broadcast_to(np.zeros(1, np.uint16), int(starts[-1]))
    return TokenFiles(Path("the built-in corpus"), tokens, starts, None)


def held_out_begin(starts: Tokens, share: float, seq: int) -> int:
    """The first token of the last ``share`` of a corpus whose documents begin at ``starts``.

    It begins a document, unless that leaves less than a sequence on either side: then the cut is within a document,
    and at least one sequence is held out.
    """
    total, document = int(starts[-1]), _first_document_held_out(starts, share)
    if min(document, total - document) > seq:
        return document
    return total - max(int(share * total), seq + 1)


def _first_document_held_out(starts: Tokens, share: float) -> int:
    return int(starts[np.searchsorted(starts, (1 - share) * starts[-1])])


def _training_end(job: Job, source: _Source) -> int:
    """The first token that is not trained on; of packed documents the first document."""
    share, seq, pair = job.run.data.held_out, job.training.seq, source.pairs[0]
    if source.packed:
        return _documents_trained_on(job, pair)
    if job.run.data.validation:
        return len(pair.tokens)
    if not job.run.evaluation.batches:
        return _first_document_held_out(pair.starts, share)
    if len(pair.tokens) < 2 * (seq + 1):
        problem = f"has {len(pair.tokens):,} tokens, one sequence to train on and one held out need {2 * (seq + 1):,}"
        remedy = "give more data, a shorter sequence (⟨seq⟩), run.data.validation, or run.evaluation.batches: 0"
        raise SpecError(f"{pair.prefix}", problem, remedy)
    return held_out_begin(pair.starts, share, seq)


def _documents_trained_on(job: Job, pair: TokenFiles) -> int:
    """All but the last of them that have the share held out, at least one."""
    if job.run.data.validation:
        return pair.documents
    begin = int(np.searchsorted(pair.starts, (1 - job.run.data.held_out) * pair.starts[-1]))
    if not job.run.evaluation.batches:
        return max(1, begin)
    if pair.documents < 2:
        remedy = "give more, run.data.validation, or run.evaluation.batches: 0"
        raise SpecError(f"{pair.prefix}", "has one document, to train on and to hold out", remedy)
    return min(max(1, begin), pair.documents - 1)


def _mixtures(job: Job, trained: Sequence[_Source], others: Sequence[_Source]) -> tuple[Mixture, Mixture | None]:
    weights, seed = job.run.data.weights, job.run.seed
    ends = [_training_end(job, source) for source in trained]
    training = _mixture(job, [(source, 0, end) for source, end in zip(trained, ends)], weights, seed)
    if not job.run.evaluation.batches:
        return training, None
    held = [(source, end, _size(source)) for source, end in zip(trained, ends)]
    evaluated = [(source, 0, _size(source)) for source in others] or held
    return training, _mixture(job, evaluated, () if others else weights, seed + _EVALUATION_SEED, once=True)


def _size(source: _Source) -> int:
    return source.pairs[0].documents if source.packed else len(source.pairs[0].tokens)


def _mixture(
    job: Job, parts: Sequence[tuple[_Source, int, int]], weights: Sequence[float], seed: int, *, once: bool = False
) -> Mixture:
    """``once``: packed documents are not repeated."""
    seq, vocab = job.training.seq, job.model.vocab
    streams: list[Stream] = []
    for number, (source, begin, end) in enumerate(parts):
        own = seed + 1000 * number
        if source.packed:
            streams.append(PackedStream(source.pairs, seq, vocab, own, begin, end, once=once))
        else:
            streams.append(Stream(source.pairs[0], seq, vocab, own, begin, end))
    return Mixture(streams, weights or [float(stream.tokens) for stream in streams], seed)


def staged(prefixes: Sequence[Place], where: str, limit_bytes: float) -> list[Place]:
    """The same pairs on fast storage (``where``: memory or a local disk), copied by the first process.

    Copies stay for the run's next start, and are valid until the original changes.
    """
    if where == "none":
        return list(prefixes)
    _require_limit(_bytes_of(prefixes), limit_bytes)
    return [_copied(prefix, _root(where)) for prefix in prefixes]


def require_staging(prefixes: Sequence[Place], built_bytes: int, where: str, limit_bytes: float) -> None:
    """Raises SpecError, before a process starts, if shards and ``built_bytes`` yet to be built do not fit there."""
    if where == "none":
        return
    _require_limit(_bytes_of(prefixes) + built_bytes, limit_bytes)
    root = _root(where)
    copied = _bytes_of([prefix for prefix in prefixes if not _folder(prefix, root).exists()]) + built_bytes
    free = shutil.disk_usage(root.parent).free
    if copied > free:
        problem = f"{readable_bytes(copied)} of shards, and {readable_bytes(free)} are free in {root.parent}"
        raise SpecError("run.data.stage", problem, "stage: none, or make room")


def _require_limit(needed_bytes: int, limit_bytes: float) -> None:
    if needed_bytes > limit_bytes:
        allowed = readable_bytes(limit_bytes)
        problem = f"{readable_bytes(needed_bytes)} of shards, more than stage_limit allows ({allowed})"
        raise SpecError("run.data.stage", problem, "stage: none, or a higher stage_limit")


def _bytes_of(prefixes: Sequence[Place]) -> int:
    return sum(path.stat().st_size for prefix in prefixes for path in _files(prefix))


def _root(where: str) -> Path:
    place = _MEMORY if where == "memory" and _MEMORY.is_dir() else Path(tempfile.gettempdir())
    return place / f"shardwise-{os.getuid()}"


def _files(prefix: Place) -> list[Place]:
    paths = [prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES]
    return [path for path in paths if path.is_file()]


def _folder(prefix: Place, root: Path) -> Path:
    """Where the copy of a pair belongs; the name changes when the pair does."""
    facts = [(absolute(str(path)), path.stat().st_size, path.stat().st_mtime_ns) for path in _files(prefix)]
    return root / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _copied(prefix: Place, root: Path) -> Path:
    files, folder = _files(prefix), _folder(prefix, root)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in files:
                if not (folder / path.name).exists():
                    part = folder / f"{path.name}.part"
                    _copy(path, part)
                    part.rename(folder / path.name)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        problem = f"{prefix} could not be copied to {root} ({error.strerror})"
        raise SpecError("run.data.stage", problem, "stage: none") from None
    return folder / prefix.name


def _copy(path: Place, target: Path) -> None:
    if isinstance(path, Path):
        shutil.copyfile(path, target)
        return
    with path.open() as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, _COPY_BYTES)
    if target.stat().st_size != path.stat().st_size:
        raise OSError(errno.EIO, "the store gave less than the whole file", str(path))

"""What a run reads: token shards by weight, or the corpus that is on every machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.spec.codec import Spec, count, quantity
from shardwise.spec.errors import SpecError, shown

MOST_SHARDS = 1024
CORPUS_VOCAB = 257  # the built-in corpus has bytes for tokens, and one that ends a document


@dataclass(frozen=True, kw_only=True)
class Data(Spec):
    """``shards`` name pairs of files without their suffix (`shardwise data build`); none: Python's own library.

    ``weights`` say how often each is drawn from (their tokens, unless given). Evaluation reads ``validation``, or the
    share ``held_out`` of the tokens, the last ones of each, which training never sees then: whole documents, or a part
    of one where there are few. ``stage`` copies shards to memory or to a local disk first, if they are no larger than
    ``stage_limit`` together.
    """

    shards: tuple[str, ...] = ()
    weights: tuple[float, ...] = field(default=(), metadata={"above": 0})
    validation: tuple[str, ...] = ()
    held_out: float = field(default=0.02, metadata={"minimum": 0, "maximum": 0.5})
    workers: Literal["auto"] | int = count("auto", minimum=1, maximum=64)
    prefetch: Literal["auto"] | int = count("auto", minimum=1, maximum=1024)
    stage: Literal["none", "memory", "local-disk"] = "none"
    stage_limit: float = quantity("bytes", 16 * 2**30)

    def check(self) -> None:
        if self.weights and len(self.weights) != len(self.shards):
            problem = f"{len(self.weights)} weights for {len(self.shards)} shards"
            raise SpecError("weights", problem, "give one for each, or none")
        for name in ("shards", "validation"):
            if len(getattr(self, name)) > MOST_SHARDS:
                problem = f"names {len(getattr(self, name)):,} pairs, a run reads {MOST_SHARDS:,} at most"
                raise SpecError(name, problem, "build larger ones: data build takes many files")
        for number, path in enumerate(self.shards):
            if path.endswith((".bin", ".idx")):
                raise SpecError(f"shards[{number}]", f"{shown(path)} has a suffix", f"write {shown(path[:-4])}")

    def check_vocabulary(self, vocab: int) -> None:
        """Raises SpecError if the built-in corpus has tokens that a model does not know."""
        if not self.shards and vocab < CORPUS_VOCAB:
            problem = f"the built-in corpus needs a vocabulary of {CORPUS_VOCAB}, the model has {vocab}"
            raise SpecError("shards", problem, "name shards that were built with the model's tokenizer")

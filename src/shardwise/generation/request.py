"""A request to generate (sampling, lengths, ranks), and its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.engine.refuse import require_runs
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

LARGEST_SEED = 2**62


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the most likely one, or one drawn from the most likely.

    Every prompt has its own random numbers, so that its text does not depend on its batch.
    """

    temperature: float = 0.0  # divides the logits; 0 takes the most likely token
    top_p: float | None = None  # draws from the fewest tokens whose probabilities add up to this
    top_k: int | None = None  # draws from this many tokens; None: from all
    seed: int = 0  # with a prompt's place among the prompts, determines its random numbers

    def check(self) -> None:
        if not 0 <= self.temperature < math.inf:
            problem = f"{self.temperature:g} is not a temperature"
            raise SpecError("⟨temperature⟩", problem, "use 0 for the most likely token, or such as 0.7")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SpecError("⟨top_p⟩", f"{self.top_p:g} is not a probability", "use more than 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise SpecError("⟨top_k⟩", f"{self.top_k}", "use 1 or more")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SpecError("⟨seed⟩", f"{self.seed} is out of range", f"use 0 to {LARGEST_SEED:,}")
        for flag, value in (("⟨top_p⟩", self.top_p), ("⟨top_k⟩", self.top_k)):
            if value is not None and self.temperature == 0:
                raise SpecError(flag, "is for sampling, and at temperature 0 nothing is drawn", "give ⟨temperature⟩")


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate with, and how."""

    source: str  # path of the weights
    model: str | None = None  # names the model if the source does not
    dtype: str | None = None  # format of the weights; None: as stored
    device: str = "cpu"
    tp: int = 1  # ranks that split the model
    sampling: Sampling = Sampling()
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()  # tokens that end a text
    batch: int = 8  # prompts generated together
    adapters: tuple[str, ...] = ()  # folders of what is added to the weights
    cache: bool = True  # without it, every token reads the whole text again

    def about(self) -> dict[str, Any]:
        """What determines the text, as plain data; device and ranks do not."""
        data = asdict(self)
        data |= data.pop("sampling")
        return {name: value for name, value in data.items() if name not in ("device", "tp", "cache")}


@dataclass(frozen=True)
class Generated:
    """The tokens generated after a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool  # the last token is one that ends a text

    @property
    def reason(self) -> str:
        return "stop" if self.stopped else "length"


@dataclass(frozen=True)
class GenerationTimes:
    """How long generating took."""

    load_seconds: float
    first_token_seconds: float  # from reading the first prompt to its first token, without loading
    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Generation:
    """What was generated after each prompt, in the order of the prompts."""

    model: str
    tp: int
    prompts: int  # how many there were
    times: GenerationTimes
    results: tuple[Generated, ...] = ()  # as tokens; empty for a file of prompts
    texts: tuple[str | None, ...] = ()
    out: Path | None = None  # where the texts of a file of prompts are


# -- checks before anything starts: layouts and prompts that cannot be run ---------------------------


def layout_of(model: Model, tp: int, dtype: str) -> Job:
    """The training layout in which ranks hold the model; raises SpecError if it does not run.

    It has no sequence parallelism, since a single new token cannot be divided.
    """
    if not model.causal:
        raise SpecError("model", f"{model.name} is not causal: it predicts no next token", "generate with a decoder")
    strategy = Strategy(tp=tp, dp=1, sequence_parallel=False)
    training = Training(global_batch=1, seq=1, precision=dtype)  # type: ignore[arg-type]
    try:
        job = Job(model=model, cluster=cluster_from(f"laptop:{tp}"), strategy=strategy, training=training)
        require_runs(job)
    except SpecError as error:
        if error.field not in ("strategy.tp", "strategy.expert_tp"):
            raise
        raise SpecError("⟨tp⟩", error.problem, error.remedy) from None
    return job


def require_prompt(model: Model, prompt: Sequence[int], request: GenerationRequest, where: str) -> None:
    """Raises SpecError for a prompt that the model cannot read, or cannot continue for as long as requested."""
    if not prompt:
        raise SpecError(where, "is empty", "give at least one token")
    wrong = next((token for token in prompt if not 0 <= token < model.vocab), None)
    if wrong is not None:
        problem = f"holds the token {wrong}, and {model.name} has {model.vocab:,}"
        raise SpecError(where, problem, "use the model's own tokenizer")
    read = len(prompt) + request.max_new_tokens - 1  # the last token is not read
    scaling = model.numerics.rope_scaling
    if model.positions == "learned" and read > model.max_seq:
        problem = f"{len(prompt)} tokens and {request.max_new_tokens} new ones"
        raise SpecError(where, f"{problem}, but {model.name} has {model.max_seq:,} positions", "lower ⟨max_new_tokens⟩")
    # Beyond this its factors change for all tokens, which would invalidate the cache.
    if model.positions == "rope" and scaling is not None and scaling.kind == "longrope":
        assert scaling.original_seq
        if read > scaling.original_seq:
            problem = f"{len(prompt)} tokens and {request.max_new_tokens} new ones go beyond {scaling.original_seq:,}"
            raise SpecError(where, f"{problem}, where longrope rotates otherwise", "lower ⟨max_new_tokens⟩")

"""A request to generate (sampling, lengths, ranks), and its results."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError

LARGEST_SEED = 2**62


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the most likely one, or one drawn from the most likely.

    Every prompt has its own random numbers, so that its text does not depend on its batch.
    """

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float | None = None
    """Draws from the fewest tokens whose probabilities add up to this."""
    top_k: int | None = None
    """Draws from this many tokens; None: from all."""
    seed: int = 0
    """With a prompt's place among the prompts, determines its random numbers."""

    def check(self) -> None:
        if not 0 <= self.temperature < math.inf:
            problem = f"{self.temperature:g} is not a temperature"
            raise SpecError("--temperature", problem, "use 0 for the most likely token, or such as 0.7")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise SpecError("--top-p", f"{self.top_p:g} is not a probability", "use more than 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise SpecError("--top-k", f"{self.top_k}", "use 1 or more")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise SpecError("--seed", f"{self.seed} is out of range", f"use 0 to {LARGEST_SEED:,}")
        for flag, value in (("--top-p", self.top_p), ("--top-k", self.top_k)):
            if value is not None and self.temperature == 0:
                raise SpecError(flag, "is for sampling, and at temperature 0 nothing is drawn", "give --temperature")


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate with, and how."""

    source: str
    """Path of the weights."""
    model: str | None = None
    """Names the model if the source does not."""
    dtype: str | None = None
    """Format of the weights; None: as stored."""
    device: str = "cpu"
    tp: int = 1
    """Ranks that split the model."""
    sampling: Sampling = Sampling()
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()
    """Tokens that end a text."""
    batch: int = 8
    """Prompts generated together."""
    cache: bool = True
    """Without it, every token reads the whole text again."""

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
    stopped: bool
    """The last token is one that ends a text."""

    @property
    def reason(self) -> str:
        return "stop" if self.stopped else "length"


@dataclass(frozen=True)
class GenerationTimes:
    """How long generating took."""

    load_seconds: float
    first_token_seconds: float
    """From reading the first prompt to its first token, without loading."""
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
    prompts: int
    """How many there were."""
    times: GenerationTimes
    results: tuple[Generated, ...] = ()
    """As tokens; empty for a file of prompts."""
    texts: tuple[str | None, ...] = ()
    out: Path | None = None
    """Where the texts of a file of prompts are."""

"""What is asked for: sampling, lengths, ranks; and what comes back."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError

LARGEST_SEED = 2**62


@dataclass(frozen=True)
class Sampling:
    """Which token follows: the most likely one (``temperature`` 0), or one drawn from the most likely.

    Of logits over the temperature, the ``top_k`` largest stay (None: all), and of these the fewest whose probabilities
    add up to ``top_p``. A prompt has its own random numbers, by ``seed`` and its place among the prompts, so that its
    text does not depend on the batch that it is in.
    """

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

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
    """``tp`` ranks on ``device`` read the weights at ``source``; ``stop`` are the tokens that end a text.

    ``model`` names the model if the source does not, ``dtype`` the format of the weights (None: as they are stored).
    ``batch`` prompts are generated together. Without ``cache`` every token reads the whole text again.
    """

    source: str
    model: str | None = None
    dtype: str | None = None
    device: str = "cpu"
    tp: int = 1
    sampling: Sampling = Sampling()
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()
    batch: int = 8
    cache: bool = True

    def about(self) -> dict[str, Any]:
        """What decides the text, as plain data; neither the device nor the ranks do."""
        data = asdict(self)
        data |= data.pop("sampling")
        return {name: value for name, value in data.items() if name not in ("device", "tp", "cache")}


@dataclass(frozen=True)
class Generated:
    """The tokens that follow one prompt; the last one is the token that ``stopped`` it, if one did."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool

    @property
    def reason(self) -> str:
        return "stop" if self.stopped else "length"


@dataclass(frozen=True)
class GenerationTimes:
    """``first_token_seconds``: from the first prompt to its first token; loading comes before."""

    load_seconds: float
    first_token_seconds: float
    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Generation:
    """What followed each prompt, in their order, as tokens and as text; of a file, ``out`` has it.

    ``prompts`` counts them.
    """

    model: str
    tp: int
    prompts: int
    times: GenerationTimes
    results: tuple[Generated, ...] = ()
    texts: tuple[str | None, ...] = ()
    out: Path | None = None

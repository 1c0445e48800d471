"""`generate`: text from a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.api.quantities import path_text, whole_number
from shardwise.api.quantities import texts as given_texts
from shardwise.api.results import Figure, Result, Rows
from shardwise.api.run_options import on_with_address
from shardwise.generation.request import Generation, GenerationRequest, Sampling
from shardwise.interop.companions import end_tokens
from shardwise.launch.pool import told_in_one_line
from shardwise.launch.preflight import require_cores
from shardwise.launch.targets.registry import target_named
from shardwise.report.console import picked
from shardwise.report.measured import generation_page
from shardwise.report.page import Page
from shardwise.run.environment import Started, started
from shardwise.spec.bare import Size
from shardwise.spec.errors import SpecError, in_flags, shown
from shardwise.spec.installation import require_packages, slow_formats
from shardwise.spec.units import parse

if TYPE_CHECKING:
    from shardwise.generation.ranks import Done, RankWork
    from shardwise.run.data.token_files import Tokenizer
    from shardwise.training.convert.weights import Weights

NEW_TOKENS, BATCH = 64, 8
WAIT_SECONDS = 60.0  # for room on a Ray cluster
OnText = Callable[[int, str], None]
OnDone = Callable[[int, int], None]
_NEVER = "none"


@dataclass(frozen=True)
class GenerationResult(Result):
    """What followed each prompt."""

    verb = "generate"
    found: Generation

    texts = Figure[tuple[str | None, ...]]("found.texts", "The text that follows each prompt; None without tokenizer.")
    tokens_per_second = Figure[float]("found.times.tokens_per_second", "New tokens of all prompts over their time.")
    first_token_seconds = Figure[float]("found.times.first_token_seconds", "From the first prompt to its first token.")

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each prompt."""
        return [list(result.tokens) for result in self.found.results]

    @cached_property
    def page(self) -> Page:
        return generation_page(self.found)

    def _data(self) -> dict[str, Any]:
        made = self.found
        times = ("tokens", "seconds", "tokens_per_second", "first_token_seconds", "load_seconds")
        return {
            **picked(made, "model", "tp", "prompts"),
            "out": made.out and str(made.out),
            **picked(made.times, *times),
            "results": [
                {**picked(result, prompt_tokens="prompt"), "text": text, **picked(result, "tokens", "reason")}
                for result, text in zip(made.results, made.texts)
            ],
        }

    def tables(self) -> Mapping[str, Rows]:
        return {"results": self.to_dict()["results"]}


def generate(
    source: str | PathLike[str],
    prompt: str | Sequence[str] = (),
    *,
    prompt_tokens: Sequence[Sequence[int]] = (),
    adapter: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    prompt_file: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    max_new_tokens: int = NEW_TOKENS,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    stop: Sequence[int] | Literal["none"] | None = None,
    batch_size: int = BATCH,
    tp: int | None = None,
    run_device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    model: str | None = None,
    tokenizer: str | PathLike[str] | None = None,
    cache: bool = True,
    on: str | None = None,
    ray_address: str | None = None,
    wait_for_resources: Size | None = None,
    replicas: int | None = None,
    on_text: OnText | None = None,
    on_done: OnDone | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> GenerationResult:
    """Continues prompts: text, ``prompt_tokens`` (a list of ids each), or a ``prompt_file`` of JSON lines.

    ``source`` is a run, a checkpoint or other weights that `shardwise convert` reads, saved in any layout; ``adapter``
    is added to them: a folder of PEFT, or a run of ours with `training.adapters` (several in turn). A text ends
    at a token of ``stop`` (default: those that the weights' folder names; "none": no token ends it) or after
    ``max_new_tokens``. ``tp`` ranks are started here, or are those that torchrun, srun or mpirun has started. With
    ``on="ray"`` a file is divided among ``replicas`` of the model on a Ray cluster (`ray,address=...`, or one started
    here), each on ``tp`` ranks of one node. ``on_text`` is called with the index of a prompt and what was added to its
    text; ``on_done`` with how many prompts of a file are done, and how many there are.
    """
    here = started()
    listed = adapter if isinstance(adapter, list | tuple) else [adapter]
    adapters = [path_text(each, "⟨adapter⟩") for each in listed]
    for path in adapters:
        if not Path(path).is_dir():
            raise SpecError("⟨adapter⟩", f"{path} is not there", "name a folder of PEFT, or a run of ours")
    request = GenerationRequest(
        str(Path(path_text(source, "source")).resolve()), model, dtype, run_device, _ranks(tp, here),
        _sampling(temperature, top_p, top_k, seed), whole_number(max_new_tokens, "⟨max_new_tokens⟩"),
        (), whole_number(batch_size, "⟨batch_size⟩"), cache=cache,
        adapters=tuple(str(Path(path).resolve()) for path in adapters),
    )  # fmt: skip
    request.sampling.check()
    place = _ray_place(on_with_address(on, ray_address), here, prompt_file, wait_for_resources, replicas)
    texts = list(given_texts(prompt, "⟨prompt⟩"))
    _check_prompts(texts, prompt_tokens, prompt_file, out)
    require_packages("generate", "torch", "safetensors")
    from shardwise.engine.refuse import require_devices
    from shardwise.generation.ranks import opened_weights, stored_dtype
    from shardwise.generation.request import layout_of

    if place is None:
        require_devices(run_device, request.tp if here is None else here.ranks_per_host)
    if here is None and place is None and run_device == "cpu":
        require_cores("⟨tp⟩", request.tp, "use fewer")
    weights = opened_weights(request)
    layout_of(weights.model, request.tp, stored_dtype(weights))
    reader, reader_name, notes = _tokenizer(weights, tokenizer, needed=bool(texts))
    if run_device == "cpu" and (stored := stored_dtype(weights)) in slow_formats():
        notes = (*notes, f"this CPU has no {stored} instructions: --dtype fp32 is many times as fast")
    request = _with_stop(request, stop, weights, reader)
    asked = _Asked(request, weights, reader, reader_name, here, notes, note)
    if prompt_file is not None:
        return _of_file(asked, Path(prompt_file), Path(str(out)), on_done, place)
    return _of_prompts(asked, texts, prompt_tokens, on_text)


@dataclass(frozen=True)
class _Asked:
    """A checked request, its weights, and the tokenizer under its name."""

    request: GenerationRequest
    weights: Weights
    tokenizer: Tokenizer | None
    tokenizer_name: str | None
    here: Started | None
    notes: tuple[str, ...]
    note: Callable[[str], None]

    @property
    def leads(self) -> bool:
        return self.here is None or self.here.rank == 0

    def run(self, work: RankWork, on_event: Callable[[Any], None], again: str = "") -> Done:
        from shardwise.generation.ranks import run_ranks

        for text in self.notes:
            self.note(text)
        with told_in_one_line(again):
            return run_ranks(self.request, work, self.here, on_event)


def _of_prompts(
    asked: _Asked, texts: Sequence[str], tokens: Sequence[Sequence[int]], on_text: OnText | None
) -> GenerationResult:
    from shardwise.generation.files import GrowingText, prompt_tokens, text_of
    from shardwise.generation.ranks import PromptList
    from shardwise.generation.request import require_prompt

    reader, model = asked.tokenizer, asked.weights.model
    prompts: list[tuple[int, ...]] = []
    for text in texts:
        assert reader is not None
        prompts.append(tuple(prompt_tokens(text, reader, "⟨prompt⟩")))
    prompts += [tuple(ids) for ids in tokens]
    for number, prompt in enumerate(prompts):
        require_prompt(model, prompt, asked.request, "⟨prompt⟩" if number < len(texts) else "⟨prompt_tokens⟩")
    growing = [GrowingText(reader, prompt) for prompt in prompts]

    def on_step(step: list[list[int]]) -> None:
        if on_text is not None:
            for number, token in step:
                if piece := growing[number].add(token):
                    on_text(number, piece)

    results, times = asked.run(PromptList(tuple(prompts)), on_step)
    if on_text is not None:
        for number, text_so_far in enumerate(growing):
            if piece := text_so_far.rest():
                on_text(number, piece)
    written = tuple(text_of(result, reader) for result in results)
    return GenerationResult(Generation(model.name, asked.request.tp, len(prompts), times, tuple(results), written))


@dataclass(frozen=True)
class _RayPlace:
    address: str | None
    wait_seconds: float
    replicas: int | None


def _ray_place(
    on: str | None, here: Started | None, prompt_file: str | PathLike[str] | None,
    wait_for_resources: Size | None, replicas: int | None,
) -> _RayPlace | None:  # fmt: skip
    """Where the models run; None: here."""
    if on is None:
        for flag, value in (("⟨replicas⟩", replicas), ("⟨wait_for_resources⟩", wait_for_resources)):
            if value is not None:
                raise SpecError(flag, "is for ⟨on=ray⟩", "leave it out")
        return None
    target = target_named(on)
    if target.name != "ray":
        raise SpecError("⟨on⟩", f"{shown(on)}: files of prompts are generated here or on ray", "use ⟨on=ray⟩")
    if here is not None:
        raise SpecError("⟨on⟩", f"{here.launcher} has started this as a rank", "leave it out, or start it alone")
    if prompt_file is None:
        remedy = "give ⟨prompt_file=FILE⟩ and ⟨out=FILE⟩, or leave it out"
        raise SpecError("⟨on⟩", "ray is for a file of prompts", remedy)
    wait = WAIT_SECONDS if wait_for_resources is None else parse(wait_for_resources, "seconds", "⟨wait_for_resources⟩")
    number = None if replicas is None else whole_number(replicas, "⟨replicas⟩", 10_000)
    return _RayPlace(target.option("address"), float(wait), number)


def _of_file(asked: _Asked, data: Path, out: Path, on_done: OnDone | None, place: _RayPlace | None) -> GenerationResult:
    from shardwise.generation.files import PartialFile, PromptFile, surveyed

    number, checksum = surveyed(data, asked.tokenizer, asked.weights.model, asked.request)
    about = {
        **asked.request.about(), "weights": asked.weights.origin, "tokenizer": asked.tokenizer_name,
        "sha256 of the prompts": checksum,
    }  # fmt: skip
    if asked.leads:
        PartialFile(out, about).check()

    def on_event(done: int) -> None:
        if on_done is not None:
            on_done(done, number)

    files = (str(data.resolve()), str(out.absolute()), asked.tokenizer_name, about)
    if place is None:
        _, times = asked.run(PromptFile(*files), on_event, "run the same command again: it goes on from there")
    else:
        from shardwise.generation.on_ray import RayPrompts

        for text in asked.notes:
            asked.note(text)
        _, times = RayPrompts(*files, place.address, place.wait_seconds, place.replicas).run(asked.request, on_event)
    return GenerationResult(Generation(asked.weights.model.name, asked.request.tp, number, times, out=out))


def _ranks(tp: int | None, here: Started | None) -> int:
    """The tensor-parallel ranks: those that a launcher has started, if one has."""
    ranks = None if tp is None else whole_number(tp, "⟨tp⟩", 2**16)
    if here is None:
        return ranks or 1
    if ranks not in (None, here.world):
        problem = f"{ranks}, but {here.world} processes were started"
        raise SpecError("⟨tp⟩", problem, "leave it out: copies of the model (dp) do not generate")
    return here.world


def _sampling(temperature: Any, top_p: Any, top_k: Any, seed: Any) -> Sampling:
    return Sampling(
        float(parse(temperature, "count", "⟨temperature⟩")),
        None if top_p is None else float(parse(top_p, "share", "⟨top_p⟩")),
        None if top_k is None else int(parse(top_k, "count", "⟨top_k⟩")),
        int(parse(seed, "count", "⟨seed⟩")),
    )


def _check_prompts(
    texts: Sequence[str], tokens: Sequence[Sequence[int]], prompt_file: str | PathLike[str] | None,
    out: str | PathLike[str] | None,
) -> None:  # fmt: skip
    if prompt_file is None and not texts and not tokens:
        remedy = "give ⟨prompt=TEXT⟩, ⟨prompt_tokens=IDS⟩, or ⟨prompt_file=FILE⟩ with ⟨out=FILE⟩"
        raise SpecError("⟨prompt⟩", "there is none", remedy)
    if prompt_file is not None and (texts or tokens):
        raise SpecError("⟨prompt_file⟩", "cannot be combined with prompts", "give one of them")
    if (prompt_file is None) != (out is None):
        missing, given = ("⟨out⟩", "⟨prompt_file⟩") if out is None else ("⟨prompt_file⟩", "⟨out⟩")
        raise SpecError(missing, f"is needed with {given}", "give both")


def _tokenizer(
    weights: Weights, named: str | PathLike[str] | None, *, needed: bool
) -> tuple[Tokenizer | None, str | None, tuple[str, ...]]:
    """The tokenizer that is named, or that came with the weights; its name; notes if there is none.

    Raises SpecError if there is none and it is ``needed``.
    """
    from shardwise.run.data.token_files import BYTES, FILE, tokenizer_from

    if named is not None:
        name = str(named) if str(named) == BYTES else str(Path(named).resolve())
        return tokenizer_from(name), name, ()
    own = None if weights.companions is None else weights.companions / FILE
    if own is not None and own.is_file():
        try:
            return tokenizer_from(str(own.resolve())), str(own.resolve()), ()
        except SpecError as error:  # its package is not installed
            if needed:
                raise
            return None, None, (f"token ids instead of text: {in_flags(error.line)}",)
    if needed:
        remedy = "give token ids: ⟨prompt_tokens=1,2,3⟩; or ⟨tokenizer=FILE⟩ (or bytes)"
        raise SpecError("⟨prompt⟩", f"needs a tokenizer, and {weights.origin} comes without a {FILE}", remedy)
    return None, None, (f"{weights.origin} comes without a {FILE}: token ids instead of text",)


def _with_stop(
    request: GenerationRequest, stop: Sequence[int] | str | None, weights: Weights, tokenizer: Tokenizer | None
) -> GenerationRequest:
    if stop == _NEVER:
        return request
    if stop is not None:
        for token in stop:
            if type(token) is not int or not 0 <= token < weights.model.vocab:
                problem = f"{shown(token)} is not a token of {weights.model.name}"
                raise SpecError("⟨stop⟩", problem, f"use ids below {weights.model.vocab:,}")
        return replace(request, stop=tuple(stop))  # type: ignore[arg-type]
    named = () if weights.companions is None else end_tokens(weights.companions)
    if not named and tokenizer is not None and tokenizer.end is not None:
        named = (tokenizer.end,)
    return replace(request, stop=named)

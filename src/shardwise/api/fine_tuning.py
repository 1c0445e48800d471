"""`finetune`: from the folder of a model and a file of conversations to what was learned of them, planned before it."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from shardwise.api.execution import TrainingResult, ready_run, trained
from shardwise.api.given import JobArguments
from shardwise.api.quantities import amount, path_text, whole_number
from shardwise.api.results import Figure, Result, Rows
from shardwise.api.run_options import RunOptions, RunPlace
from shardwise.interop.companions import companions, folder_of_model
from shardwise.interop.hub_cache import cached_model
from shardwise.interop.jobs import model_from
from shardwise.launch.outcome import Outcome
from shardwise.launch.run import Launch
from shardwise.planner.advice.method import METHODS, WORDS, ChosenMethod, Method, choose_method
from shardwise.planner.request import Request
from shardwise.report.fine_tuning import AnswerSample, ReadyFineTuning, fine_tuning_data, fine_tuning_page
from shardwise.report.page import Page
from shardwise.run.checkpoint.folder import folder_at
from shardwise.run.data.conversations import ANSWERS, Answers, RecordRules
from shardwise.spec.clusters import job_cluster_from
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import parse_json
from shardwise.spec.fine_tuning import Adapters
from shardwise.spec.hub import is_hub_id
from shardwise.spec.job import Job
from shardwise.spec.lengths import Lengths
from shardwise.spec.model import Model
from shardwise.spec.rules import sequence_note
from shardwise.spec.stack import stack_from
from shardwise.spec.training import RECIPES

if TYPE_CHECKING:
    from shardwise.run.data.build import Built

OnProgress = Callable[[str], None]
Choice = Literal["auto", "full", "lora", "qlora"]
CHOICES: tuple[str, ...] = get_args(Choice)
HELD_OUT = 0.05
EPOCHS = 3.0
BATCH = 16  # sequences of a step, of which a short data set still makes a good many
SAMPLE_TOKENS = 64
# Peak learning rates: LoRA's is about ten times that of all weights (Hu et al. 2021, arXiv 2106.09685, table 11;
# Biderman et al. 2024, arXiv 2405.09673, section 4).
RATES: dict[Method, float] = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
_LONGEST = 4096  # sequence length that is chosen at most where none is given
_WARMUP = 0.03  # share of the steps


@dataclass(frozen=True)
class FineTuningResult(Result):
    """What a fine-tuning was planned as, how it went, and what it left."""

    verb = "finetune"
    ready: ReadyFineTuning
    training: TrainingResult | None
    """None if only the plan was asked for."""
    written: Path | None = None
    sample: AnswerSample | None = None

    method = Figure[str]("ready.choice.method", "The method: full, lora or qlora.")
    job = Figure[Job]("ready.job", "What is trained; to_yaml() is its file.")
    predicted_seconds = Figure[float]("ready.total_seconds", "The predicted time of all steps.")

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def status(self) -> int:
        """The command's exit status: that of its training."""
        return 0 if self.training is None else self.training.status

    @cached_property
    def page(self) -> Page:
        training = self.training
        trained = () if training is None else training.page.pieces
        return fine_tuning_page(trained, self.written, self.sample)

    def _data(self) -> dict[str, Any]:
        data = fine_tuning_data(self.ready, self.written, self.sample)
        return {**data, "training": None if self.training is None else self.training.to_dict()}

    def tables(self) -> Mapping[str, Rows]:
        return {} if self.training is None else self.training.tables()


@dataclass(frozen=True, kw_only=True)
class FineTuningOptions:
    """What may be chosen; the rest follows from the data and the machine."""

    cluster: str | None = None
    """The devices: a preset such as workstation-4090, or a file of `calibrate` (default: this machine)."""
    method: Choice = "auto"
    """What is trained: all weights (full), adapters (lora), or adapters over a base in 4 bits (qlora); auto: the first
    that fits."""
    seq: int | str | None = None
    """Tokens of a sequence (default: what holds nearly every conversation, up to 4096)."""
    precision: str | None = None
    """Recipe of the passes, such as fp8 (default: the device's usual); QLoRA's are 16 bits wide instead of 8."""
    compile: bool = False
    """Compile every layer (training.compile); steps are faster after a start of a minute or more."""
    epochs: float | str = EPOCHS
    """Passes over the data (default 3)."""
    steps: int | str | None = None
    """Steps to train; in place of epochs."""
    global_batch: int | str = BATCH
    """Sequences of a step (default 16)."""
    learning_rate: float | str | None = None
    """Peak learning rate (default 2e-4 for adapters, 2e-5 for all weights)."""
    adapter_rank: int | str | None = None
    """Rank of the adapters (default 16); with it, only methods with adapters are tried."""
    dora: bool = False
    """Train DoRA in place of LoRA; with it, only methods with adapters are tried."""
    out: str | PathLike[str] | None = None
    """Where to write the output; a folder of the run (default runs/NAME-finetune)."""
    chat_template: str | None = None
    """Template of conversations in Jinja, or a folder that has one (default: the model's)."""
    answers: Answers = "all"
    """Answers of a conversation that the loss counts: all or the last (default all)."""
    plan_only: bool = False
    """Show the method, time and memory, and train nothing."""

    @classmethod
    def taken_from(cls, options: Mapping[str, Any]) -> FineTuningOptions:
        """From keywords; raises SpecError for an unknown one."""
        known = [item.name for item in fields(cls)]
        for name in options:
            if name not in known:
                raise SpecError(f"⟨{name}⟩", "is not an option of finetune", nearest_name(name, known))
        return cls(**options)

    def check(self) -> None:
        """Call it before the data is read, which may take long; raises SpecError."""
        for name, words in (("method", CHOICES), ("answers", ANSWERS)):
            if (chosen := getattr(self, name)) not in words:
                raise SpecError(f"⟨{name}⟩", f"{shown(chosen)} is not a choice", "choose one of " + ", ".join(words))
        if self.precision not in (None, *RECIPES):
            remedy = nearest_name(shown(self.precision), RECIPES)
            raise SpecError("⟨precision⟩", f"{shown(self.precision)} is not a recipe", remedy)
        for name in ("seq", "steps", "global_batch"):
            if (given := getattr(self, name)) is not None:
                whole_number(given, f"⟨{name}⟩")
        amount(self.epochs, "count", "⟨epochs⟩", "3")
        if self.learning_rate is not None:
            amount(self.learning_rate, "count", "⟨learning_rate⟩", "2e-4")
        if self.method == "full" and self.names_adapters:
            name = "dora" if self.dora else "adapter_rank"
            raise SpecError(f"⟨{name}⟩", "changes adapters, and full trains all weights", "leave one of them out")
        if self.cluster is not None:
            job_cluster_from(self.cluster)
        _ = self.adapters

    @property
    def names_adapters(self) -> bool:
        return self.dora or self.adapter_rank is not None

    @property
    def methods(self) -> tuple[Method, ...]:
        """Those to try, in this order."""
        if self.method != "auto":
            return (self.method,)
        return METHODS[1:] if self.names_adapters else METHODS

    @property
    def adapters(self) -> Adapters:
        rank = Adapters.rank if self.adapter_rank is None else whole_number(self.adapter_rank, "⟨adapter_rank⟩")
        try:
            return Adapters(rank=rank, alpha=2.0 * rank, method="dora" if self.dora else "lora")
        except SpecError as error:
            raise SpecError("⟨adapter_rank⟩", error.problem, error.remedy) from None


def finetune(
    model: str | PathLike[str],
    data: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    on_ready: Callable[[ReadyFineTuning], None] | None = None,
    on_progress: OnProgress | None = None,
    supervised: Callable[[Launch], Outcome] | None = None,
    **options: Any,
) -> FineTuningResult:
    """Adapts the model of a Hugging Face folder to conversations: ``finetune("models/Llama-3.2-1B", "chats.jsonl")``.

    Reads the data, chooses the method that fits this machine, plans it, trains with evaluation on a held-out part, and
    writes an adapter that `peft` loads (all weights: a Hugging Face folder). ``on_ready`` is called before anything is
    trained. Called again with the same ``out``, it resumes. The fields of `FineTuningOptions` are keywords.
    """
    chosen, report = FineTuningOptions.taken_from(options), on_progress or (lambda text: None)
    chosen.check()
    folder = _model_folder(path_text(model, "model"))
    files = data if isinstance(data, list | tuple) else [data]
    ready = _made_ready(folder, [Path(path_text(file, "data")) for file in files], chosen, report)
    if on_ready is not None:
        on_ready(ready)
    if chosen.plan_only:
        return FineTuningResult(ready, None)
    launched = supervised or (lambda launch: launch.supervised(lambda event: report(str(event))))
    run = RunOptions()
    try:
        done = trained(ready_run(_arguments(ready.job, folder), run, RunPlace.of(None, None), note=report), launched)
    except SpecError as error:
        if "⟨run_folder⟩" not in error.remedy:
            raise
        raise SpecError(error.field, error.problem, "name another folder (⟨out⟩), or what that run was given") from None
    if not done.ok:
        return FineTuningResult(ready, done)
    report("writing what was learned")
    written = _written(ready, done)
    report("answering a held-out prompt, before and after")
    return FineTuningResult(ready, done, written, _sample(ready, folder, written))


def _model_folder(model: str) -> Path:
    cached = None if os.path.exists(model) else cached_model(model)  # noqa: PTH110 (raises for an invalid path)
    folder = cached or folder_of_model(str(Path(model).absolute()))  # "tiny" alone would name a preset
    here = Path(model).is_dir()
    if is_hub_id(model) and not here and (folder is None or not (folder / "tokenizer.json").is_file()):
        problem = f"{shown(model)} is not a folder, nor in this machine's Hugging Face cache with its tokenizer"
        raise SpecError("model", problem, f"run `hf download {model}`, or name the folder of a model")
    if folder is None and here and folder_at(Path(model)).committed():
        raise SpecError("model", f"{shown(model)} is a run", "convert it with ⟨to=huggingface⟩, and name that folder")
    if folder is None:
        remedy = "name the folder of a model: config.json, weights and tokenizer, as from huggingface.co"
        raise SpecError("model", f"{shown(model)} is not a Hugging Face folder", remedy)
    if not (folder / "tokenizer.json").is_file():
        raise SpecError("model", f"{folder} has no tokenizer.json", "save the tokenizer beside the weights")
    return folder


def _made_ready(folder: Path, files: list[Path], options: FineTuningOptions, report: OnProgress) -> ReadyFineTuning:
    from shardwise.run.data.run_data import check_data

    model = model_from(str(folder))
    out = Path(options.out if options.out is not None else f"runs/{model.name}-finetune").absolute()
    report("reading the conversations")
    try:
        built, prompt = _build(folder, files, out, options)
    except OSError as error:
        place, reason = str(error.filename or out), error.strerror or str(error)
        raise SpecError("⟨out⟩", f"{place} cannot be written ({reason})", "name another folder") from None
    lengths = _lengths(built.prefix)
    seq = _seq(model, lengths, options)
    methods, note = _methods(folder, options)
    choice = _chosen(model, lengths, seq, methods, options, report)
    job = _job(folder, out, built, choice, options)
    notes = (*check_data(job), *filter(None, [note, sequence_note(job.model, job.training)]))
    return ReadyFineTuning(built, lengths, choice, job, prompt, notes)


def _build(folder: Path, files: list[Path], out: Path, options: FineTuningOptions) -> tuple[Built, tuple[int, ...]]:
    """Token files of the conversations, and the prompt of the last, which is held out."""
    from shardwise.run.data.build import build
    from shardwise.run.data.example import last_prompt

    rules = RecordRules(answers=options.answers)
    template = options.chat_template
    place = out / f"data-{_digest(folder, files, options)}"
    place.mkdir(parents=True, exist_ok=True)
    built = build(files, place / "conversations", tokenizer=str(folder), template=template, records=rules,
                  workers=os.cpu_count() or 1)  # fmt: skip
    if built.preferences:
        raise SpecError("data", "holds preferences", "train them with `shardwise train` and training.task: dpo")
    return built, last_prompt(built.prefix)


def _digest(folder: Path, files: list[Path], options: FineTuningOptions) -> str:
    """Of all that token files are made from: those of a run are never replaced by others."""
    digest = hashlib.sha256(options.answers.encode())
    beside = [Path(options.chat_template)] if options.chat_template else []
    for place in (folder, *beside):
        known = companions(place) if place.is_dir() else {"template": place}
        files = files + [path for name, path in known.items() if "token" in name or "template" in name]
    for path in files:
        if path.is_file():  # else it is refused where it is read
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:8]


def _lengths(prefix: Path) -> Lengths:
    from shardwise.run.data.lengths import measured_lengths

    measured = measured_lengths(str(prefix))
    return Lengths.from_dict({"histogram": measured["histogram"], "labels": max(1e-6, measured["labels"])})


def _seq(model: Model, lengths: Lengths, options: FineTuningOptions) -> int:
    """A power of two that cuts off at most a hundredth of all tokens, as far as the model and memory go."""
    if options.seq is not None:
        return whole_number(options.seq, "⟨seq⟩")
    most = min(model.max_seq, _LONGEST)
    seq = 128
    while seq < most and lengths.cut_share(seq) > 0.01:
        seq *= 2
    return min(seq, most)


def _methods(folder: Path, options: FineTuningOptions) -> tuple[tuple[Method, ...], str | None]:
    """Those to try, with a note where the folder's weights have 4 bits: then they stay so unless asked for."""
    settings = parse_json((folder / "config.json").read_text()).get("quantization_config")
    if not isinstance(settings, dict) or not settings.get("load_in_4bit"):
        return options.methods, None
    if options.method == "auto":
        return ("qlora",), f"{folder.name} keeps its weights in 4 bits; only adapters over them are tried"
    if options.method == "qlora":
        return options.methods, None
    return options.methods, f"{folder.name} keeps its weights in 4 bits; they are dequantised first"


def _chosen(
    model: Model,
    lengths: Lengths,
    seq: int,
    methods: tuple[Method, ...],
    options: FineTuningOptions,
    report: OnProgress,
) -> ChosenMethod:
    cluster = job_cluster_from(options.cluster or _devices_here())
    batch = whole_number(options.global_batch, "⟨global_batch⟩")
    training = {"seq": seq, "global_batch": batch, "task": "sft", "lengths": lengths, "compile": options.compile}
    if options.precision is not None:
        training["precision"] = options.precision
    job = Job.from_dict({"model": model, "cluster": cluster, "training": training, "stack": stack_from("shardwise")})
    return choose_method(
        Request(job), options.adapters, methods=methods,
        progress=lambda method, count: report(f"planning {WORDS[method]}: {count:,} strategies priced"),
    )  # fmt: skip


def _devices_here() -> str:
    from shardwise.measure.step import devices_here  # imports torch

    return devices_here()


def _job(folder: Path, out: Path, built: Built, choice: ChosenMethod, options: FineTuningOptions) -> Job:
    """The plan with its data, length, rate and folders."""
    planned = choice.plan.best.job
    training, lengths = planned.training, planned.training.lengths
    assert lengths is not None
    packed = built.tokens * (1 - HELD_OUT) / (training.seq * lengths.packed_share(training.seq))
    epochs = amount(options.epochs, "count", "⟨epochs⟩", "3")
    wanted = max(1, math.ceil(packed * epochs / planned.sequences))
    steps = wanted if options.steps is None else whole_number(options.steps, "⟨steps⟩")
    rate = RATES[choice.method]
    if options.learning_rate is not None:
        rate = amount(options.learning_rate, "count", "⟨learning_rate⟩", "2e-4")
    optimization = replace(training.optimization, learning_rate=rate, decay=0.0)
    run = {
        "steps": steps,
        "folder": str(out),
        "start_from": str(folder),
        "data": {"shards": [str(built.prefix)], "held_out": HELD_OUT, "packing": "packed"},
        "schedule": {"kind": "cosine", "warmup": min(steps - 1, round(_WARMUP * steps))},
    }
    job = Job.from_dict(planned.to_dict() | {"run": run})
    return replace(job, training=replace(job.training, optimization=optimization))


def _arguments(job: Job, folder: Path) -> JobArguments:
    """The model by its folder, whose tokenizer and other files go with the run."""
    return JobArguments(source={**job.to_dict(), "model": str(folder)})


def _written(ready: ReadyFineTuning, done: TrainingResult) -> Path:
    """An adapter as `peft` loads it, or a Hugging Face folder of all weights; in place of one of fewer steps."""
    from shardwise.training.convert import sources

    adapted = ready.job.training.adapters is not None
    place = done.folder / ("adapter" if adapted else "model")
    if place.is_dir() and done.outcome is None:
        return place
    shutil.rmtree(place, ignore_errors=True)
    if adapted:
        return sources.write_as_adapter(done.folder, place)
    return sources.write_huggingface(sources.open_weights(done.folder), place, lambda size: None)


def _sample(ready: ReadyFineTuning, folder: Path, written: Path) -> AnswerSample | None:
    """The model's answer to a held-out prompt, with and without what was learned; None if it has no room for one."""
    from shardwise.api.generation import generate
    from shardwise.run.data.token_files import tokenizer_from

    model = ready.job.model
    scaling = model.numerics.rope_scaling
    room = min(model.max_seq, (scaling and scaling.original_seq) or model.max_seq)
    if not ready.prompt or len(ready.prompt) + SAMPLE_TOKENS > room:
        return None
    device: Literal["cpu", "cuda"] = "cuda" if ready.job.run_device == "cuda" else "cpu"
    shared: dict[str, Any] = {"max_new_tokens": SAMPLE_TOKENS, "tokenizer": str(folder), "run_device": device}
    shared["prompt_tokens"] = [list(ready.prompt)]
    adapted = ready.job.training.adapters is not None
    before = generate(str(folder), **shared)
    source, adapter = (str(folder), (str(written),)) if adapted else (str(written), ())
    after = generate(source, adapter=adapter, **shared)
    prompt = tokenizer_from(str(folder)).decode_all(ready.prompt)
    return AnswerSample(prompt, before.texts[0] or "", after.texts[0] or "")

"""Writes docs/imports.md: what becomes of TorchTitan's integration tests and Megatron-LM's functional tests here.

`--check` only says whether the page is what the code gives today. `--verify` runs every kind of layout among them that
has at most four ranks against one process, and keeps the deviations for the page: it may be stopped, and goes on.
"""

from __future__ import annotations

import collections
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.api import analyze
from shardwise.api.given import arguments_of
from shardwise.api.inputs import job_from
from shardwise.interop.frameworks import TARGETS, read
from shardwise.interop.frameworks.documents import flatten
from shardwise.measure.reference import on_fewer_ranks, with_small_model
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.units import readable_bytes, readable_seconds

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "tests" / "interop" / "frameworks" / "published"
VERIFIED = PUBLISHED / "verified.json"
PROCESSES, STEPS = 4, 2
USUAL_DEVICES, MOST_DEVICES = 8, 512


@dataclass(frozen=True)
class Case:
    """One run of a framework's own tests, as the text of a configuration file of that framework."""

    framework: str
    name: str
    file: str
    text: str
    devices: int | None
    cluster: str


@dataclass(frozen=True)
class Outcome:
    """What became of a case: the job that it describes, or why there is none."""

    case: Case
    refused: str = ""
    job: Job | None = None
    runs_as: Job | None = None  # the same on our engine
    notes: tuple[str, ...] = ()


# -- the cases -------------------------------------------------------------------------------------------------


def published(framework: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PUBLISHED / f"{framework}.json").read_text(encoding="utf-8"))
    return found


def cases() -> list[Case]:
    return [*torchtitan_cases(), *megatron_cases()]


def torchtitan_cases() -> Iterator[Case]:
    content, one = published("torchtitan"), TARGETS["torchtitan"]
    for name, case in content["cases"].items():
        for number, words in enumerate(case["runs"], start=1):
            settings = {**flatten(content["base"], "base"), **overrides(words)}
            text = one.format.render(settings, one.names)
            title = name if len(case["runs"]) == 1 else f"{name}, run {number}"
            yield Case("torchtitan", title, "case.toml", text, case["gpus"], "dgx-h100")


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """The settings of TorchTitan's command line: ``--a.b value``, ``--a.b=value``, or ``--a.b`` for true."""
    settings: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            settings[key] = _typed(value) if equals else True
        elif isinstance(settings[key], bool):
            settings[key] = _typed(word)
        else:  # a list
            settings[key] = [*(settings[key] if isinstance(settings[key], list) else [settings[key]]), word]
    return settings


def _typed(word: str) -> Any:
    return int(word) if re.fullmatch(r"-?\d+", word) else {"true": True, "false": False}.get(word.lower(), word)


def megatron_cases() -> Iterator[Case]:
    from shardwise.interop.frameworks.megatron_files import argument_words

    for name, case in published("megatron")["cases"].items():
        options = [shlex.join([key, *argument_words(value)]) for key, value in case.get("arguments", {}).items()]
        text = " \\\n".join([f"python {case['script']}", *options]) + "\n"
        cluster = "gb200-nvl72" if case.get("platform") == "gb200" else "dgx-h100"
        yield Case("megatron", name, "case.sh", text, case.get("gpus"), cluster)


# -- what becomes of them --------------------------------------------------------------------------------------


def outcome(case: Case, folder: Path) -> Outcome:
    """Reads the case as a user's file would be read."""
    path = folder / case.file
    path.write_text(case.text, encoding="utf-8")
    try:
        read(path, case.framework)
        return _on_enough_devices(case, path)
    except SpecError as error:
        return Outcome(case, refused=str(error).removeprefix(f"{case.file}: "))


def _on_enough_devices(case: Case, path: Path) -> Outcome:
    """On the devices of the recipe; without one on 8, or on the fewest that the degrees allow."""
    devices = case.devices or USUAL_DEVICES
    while True:
        given = arguments_of({"cluster": case.cluster, "gpus": devices}, str(path))
        try:
            job, notes = job_from(given)
            return Outcome(case, job=job, runs_as=_as_ours(job_from(given, runs_here=True)[0]), notes=tuple(notes))
        except SpecError as error:
            if case.devices or not error.field.startswith("strategy") or devices >= MOST_DEVICES:
                raise
            devices *= 2


def _as_ours(job: Job) -> Job:
    """With what this engine overlaps and without dropout, neither of which is part of a layout."""
    ours = job.strategy.unchecked(overlap=Strategy().overlap)
    return replace(job, strategy=ours, training=replace(job.training, dropout=False))


def outcomes() -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        return [outcome(case, Path(folder)) for case in cases()]


# -- verification ----------------------------------------------------------------------------------------------


def small(job: Job) -> Job | None:
    """The job as `verify --shrink --max-processes 4` runs it; None if its kind of layout needs more processes."""
    try:
        return with_small_model(on_fewer_ranks(job, PROCESSES))
    except SpecError:
        return None


def kind(job: Job) -> str:
    """What distinguishes a verified run from another: layout and kind of model."""
    model = "dense" if job.model.moe is None else "experts"
    return ", ".join([layout(job), model, *(["latent attention"] if job.model.mla else [])])


def verify_kinds(found: Sequence[Outcome]) -> None:
    """Runs one case of every kind, the most frequent first, against one process, and writes the worst deviations."""
    from shardwise.api import verify

    kinds: dict[str, list[Outcome]] = {}
    for one in found:
        run = small(one.runs_as) if one.runs_as is not None else None
        if run is not None and run.strategy.world > 1:
            kinds.setdefault(kind(run), []).append(one)
    chosen = {name: own[0] for name, own in sorted(kinds.items(), key=lambda item: -len(item[1]))}
    kept: dict[str, Any] = json.loads(VERIFIED.read_text(encoding="utf-8")) if VERIFIED.is_file() else {}
    kept = {name: value for name, value in kept.items() if name in chosen}
    for number, (name, one) in enumerate(chosen.items(), start=1):
        if name in kept:
            continue
        assert one.runs_as is not None
        try:
            result = verify(one.runs_as, steps=STEPS, max_processes=PROCESSES, shrink=True)
            kept[name] = {"case": one.case.name, "ok": result.ok, "worst": max(result.worst.values())}
        except SpecError as error:
            kept[name] = {"case": one.case.name, "refused": str(error)}
        print(f"{number} of {len(chosen)}: {name}: {kept[name]}", flush=True)
        VERIFIED.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")


# -- the page --------------------------------------------------------------------------------------------------

TITLES = {"torchtitan": "TorchTitan", "megatron": "Megatron-LM"}
INTRODUCTION = """\
# Other frameworks' own test configurations

Generated by `python docs/make_imports.py`: every combination that TorchTitan's integration tests and Megatron-LM's
functional tests run, read as a user's file is read, then priced, or refused with the reason. Nobody chose them for
this tool. A file of your own goes the same way:

    shardwise analyze train.toml --gpus 64          # TorchTitan 0.2; a flavor of your own: --model
    shardwise analyze run.json --gpus 64            # what a run of TorchTitan has saved of its configuration
    shardwise analyze pretrain.sh --gpus 64         # a script that starts Megatron-LM's pretrain_gpt.py
    shardwise analyze model_config.yaml --gpus 8    # MODEL_ARGS of Megatron-LM's functional tests

`plan`, `verify`, `report` and `export` take them too ([other frameworks' files](export.md#other-frameworks-files)).

- TorchTitan: {torchtitan_source}, commit {torchtitan_commit},
  {torchtitan_from}.
  Later versions have no configuration files: their runs are Python functions, and what one has saved is read.
- Megatron-LM: {megatron_source}, commit {megatron_commit},
  {megatron_from}.

Their names and options are in `tests/interop/frameworks/published/`. The models are tiny, so a step is launches and
latency. The figures are predictions for a DGX H100 (GB200 where only a recipe for that names the test), on as many
devices as the test takes. Where Megatron-LM's recipes no longer list a test, it is priced on 8 devices, or on the
fewest that its degrees allow.

Verified: the layout, with fewer and narrower layers of the same kind on at most four CPU processes, without dropout
and with what this engine overlaps, equals one process
(`python docs/make_imports.py --verify`): the worst relative deviation of loss, gradients and weights after {steps}
steps. One test of a kind of layout ran for all of that kind, the most frequent kinds first; where the column is empty
it is one device, or was not run. The same for one file:

    shardwise verify model_config.yaml --gpus 8 --shrink --max-processes 4 --steps {steps} \\
        --set training.dropout=false --set strategy.overlap.dp=true
"""


def layout(job: Job) -> str:
    """The degrees above one, sharding and what else makes a layout, in the words of the job file."""
    own = job.strategy
    degrees = {"tp": own.tp, "cp": own.cp, "pp": own.pp, "dp": own.data_parallel, "ep": own.ep}
    words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if own.pp > 1:
        words.append(own.schedule)
    if own.zero and own.gradient_group > 1:
        words.append(f"zero {own.zero}")
    if own.zero and own.sharding_group < own.gradient_group:
        words.append(f"shard_group {own.sharding_group}")
    if own.cp > 1:
        words.append(own.context_method)
    if own.tp > 1 and not own.sequence_parallel:
        words.append("no sequence_parallel")
    if own.ep > 1 and own.expert_tensor_parallel > 1:
        words.append(f"expert_tp {own.expert_tensor_parallel}")
    if own.recompute != "none":
        words.append(f"recompute {own.recompute}")
    return " ".join(words) or "one device"


def page(found: Sequence[Outcome]) -> str:
    verified = json.loads(VERIFIED.read_text(encoding="utf-8")) if VERIFIED.is_file() else {}
    lines = [*_introduction(found, verified)]
    for framework, title in TITLES.items():
        own = [one for one in found if one.case.framework == framework]
        lines += [f"## {title}", "", *_priced(own, verified), "", *_refused(own), "", *_unused(own), ""]
    return "\n".join(lines).rstrip() + "\n"


def _introduction(found: Sequence[Outcome], verified: Mapping[str, Any]) -> Iterator[str]:
    sources = {f"{name}_{key}": value for name in TITLES for key, value in published(name).items() if key != "cases"}
    yield from INTRODUCTION.format(steps=STEPS, **sources).splitlines()
    yield ""
    yield "| | runs | priced | of those verified | refused |"
    yield "|---|---|---|---|---|"
    for framework, title in TITLES.items():
        own = [one for one in found if one.case.framework == framework]
        priced = [one for one in own if one.job is not None]
        checked = [one for one in priced if _deviation(one, verified).startswith("yes")]
        yield f"| {title} | {len(own)} | {len(priced)} | {len(checked)} | {len(own) - len(priced)} |"
    yield ""


def _deviation(one: Outcome, verified: Mapping[str, Any]) -> str:
    """Whether the kind of layout was run here; why not, if the engine refuses it."""
    if one.runs_as is None or one.runs_as.strategy.world == 1:
        return ""
    run = small(one.runs_as)
    if run is None:
        return "more than four processes"
    entry = verified.get(kind(run))
    if entry is None:
        return ""
    return f"yes, {entry['worst']:.0e}" if entry.get("ok") else f"no: {entry.get('refused', 'it differs')}"


def _priced(found: Sequence[Outcome], verified: Mapping[str, Any]) -> Iterator[str]:
    yield "| test | devices | layout | step | memory | verified |"
    yield "|---|---|---|---|---|---|"
    for one in found:
        if one.job is not None:
            price = analyze(one.job)
            figures = f"{readable_seconds(price.predicted_seconds)} | {readable_bytes(price.memory_bytes)}"
            fits = "" if price.fits else " (does not fit)"
            words = f"{one.job.cluster.devices} | {layout(one.job)} | {figures}{fits}"
            yield f"| {one.case.name} | {words} | {_deviation(one, verified)} |"


def _refused(found: Sequence[Outcome]) -> Iterator[str]:
    yield "| refused | why |"
    yield "|---|---|"
    for one in found:
        if one.job is None:
            yield f"| {one.case.name} | {_escaped(one.refused)} |"


def _unused(found: Sequence[Outcome]) -> Iterator[str]:
    """How often a setting of a priced test has no field in a job, or was read in a way that is worth a note."""
    counts = collections.Counter(note for one in found for note in {_noted(note) for note in one.notes} - {""})
    yield "Said when they are read, and how often:"
    yield ""
    yield from (f"- {note} ({number})" for note, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _noted(note: str) -> str:
    setting = re.fullmatch(r"(\S+) = .* is known to \S+, not priced here", note)
    return f"`{setting[1]}` is not priced" if setting else _escaped(note)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def main() -> int:
    found = outcomes()
    if "--verify" in sys.argv:
        verify_kinds(found)
    text, path = page(found), ROOT / "docs" / "imports.md"
    if "--check" in sys.argv:
        return int(not path.is_file() or path.read_text(encoding="utf-8") != text)
    path.write_text(text, encoding="utf-8")
    print("wrote", path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())

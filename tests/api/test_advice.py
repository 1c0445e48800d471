"""Advice in a file's own settings: what it writes is read as the job that it has priced, for every framework."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.running import error_line, run
from interop.frameworks.random_jobs import drawn
from interop.frameworks.test_recipes import AXOLOTL, RECIPES
from shardwise.api.advice import file_advice
from shardwise.api.given import JobArguments, arguments_of
from shardwise.api.inputs import decided_job, source_of
from shardwise.cost.step.verdict import neighbours
from shardwise.interop.edits import edited
from shardwise.interop.frameworks import READERS, TARGETS, Configuration
from shardwise.interop.frameworks.documents import with_settings
from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_json, parse_toml, parse_yaml
from shardwise.spec.job import Job

ADVISED = [name for name, reader in READERS.items() if reader.compose or reader.moves or reader.microbatch_key]
COMMENTED = "# ours\n"


def written(name: str, folder: Path) -> JobArguments:
    """A file of the framework, and what it leaves open."""
    if name in RECIPES:
        text, values = yaml.safe_dump(RECIPES[name], sort_keys=False), dict[str, Any](cluster="dgx-h100")
        file = f"{name}.yml"
    else:
        (job,) = drawn(name, seed=11, number=1)
        ((file, text),) = TARGETS[name].export(job).files.items()
        values = {"cluster": job.cluster, "training.seq": job.training.seq, "model": job.model,
                  "training.global_batch": job.sequences, "strategy.microbatch": job.strategy.microbatch}  # fmt: skip
        if name != "accelerate":
            values.pop("strategy.microbatch")
    (folder / file).write_text(text if file.endswith(".json") else COMMENTED + text)
    return arguments_of(values, str(folder / file))


def configuration(arguments: JobArguments) -> Configuration:
    source = source_of(arguments)
    assert isinstance(source, Configuration)
    return source


def read_again(arguments: JobArguments, text: str) -> Job:
    return decided_job(replace(arguments, file=None, source=replace(configuration(arguments), text=text)))[0]


@pytest.mark.parametrize("name", ADVISED)
def test_what_is_written_is_the_job_that_was_priced(name: str, tmp_path: Path) -> None:
    arguments = written(name, tmp_path)
    job, _ = decided_job(arguments)
    advice = file_advice(arguments, job)
    assert read_again(arguments, advice.text) == (advice.changes[-1].after.job if advice.changes else job)
    for change in advice.changes:
        better = change.after.step_seconds < change.before.step_seconds
        assert better or change.before.fit == "does not fit"


@pytest.mark.parametrize("name", ADVISED)
def test_every_change_that_may_be_advised_keeps_the_rest_of_the_file(name: str, tmp_path: Path) -> None:
    """Each edit is read as if its settings had been in the file from the beginning; other lines stay as they are."""
    arguments = written(name, tmp_path)
    job, _ = decided_job(arguments)
    source, changed = configuration(arguments), 0
    for settings in source.edits(job, neighbours(job)):
        text = edited(source.text, source.file, settings)
        lines = difflib.ndiff(source.text.splitlines(), text.splitlines())
        gone = [line for line in lines if line.startswith("- ")]
        names = [key.rpartition(".")[2].replace("_", "-") for key in settings]
        assert all(
            any(one in line.replace("_", "-") for one in names) or line[2:].strip(" ,}") in text for line in gone
        )
        assert not source.text.startswith(COMMENTED) or text.startswith(COMMENTED)
        try:
            changed += read_again(arguments, text) != job
        except SpecError:  # what the framework refuses is not advised
            continue
    assert changed, "some of its settings change the job"


def test_the_command_prints_advice_in_the_files_own_keys_and_writes_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    text = "# mine\n" + yaml.safe_dump({**AXOLOTL, "adapter": None, "micro_batch_size": 4}, sort_keys=False)
    recipe.write_text(text)
    new = tmp_path / "new.yml"
    flags = ("--gpus", "8", "--advise", "--write", str(new))
    done = run("analyze", str(recipe), *flags)
    assert "What to change in recipe.yml" in done.out and f"wrote {new}" in done.out
    assert new.read_text().startswith("# mine\nbase_model: llama3-8b\n")
    again = run("analyze", str(new), "--gpus", "8", "--json")
    changes = parse_json(run("analyze", str(recipe), "--gpus", "8", "--advise", "--json").out)["advice"]["changes"]
    assert again.status == 0 and 1 <= len(changes) <= 3 and all(change["settings"] for change in changes)
    assert changes[-1]["predicted_seconds"] == pytest.approx(parse_json(again.out)["time"]["predicted_seconds"])


def test_advice_is_for_files_of_other_frameworks(tmp_path: Path) -> None:
    model = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--global-batch", "64")
    assert "advise" in error_line(run("analyze", *model, "--advise"))
    assert "advise" in error_line(run("analyze", *model, "--write", str(tmp_path / "new.yml")))


# -- the text ----------------------------------------------------------------------------------------------------------

TEXTS = {
    "x.yaml": "# head\na: 1  # one\nsection:\n  - x\n  - y # why\n# before\nb: {c: 2}\nempty:\nnested:\n"
              "  d: 'q'  # last\n  e:\n    f: null\nz: |\n  text\n  more\n",
    "x.json": '{ // head\n\t"a": 1, /* one */\n  "section": ["x", "y"],\n  "b": {"c": 2,},\n  "empty": {},\n'
              '  "nested": {\n    "d": "q # no comment",\n    "e": {"f": null}\n  }\n}\n',
    "x.toml": 'a = 1 # one\n[b]\nc = 2\n\n[nested]\nd = "q" # last\n[nested.e]\nf = 1\n',
}  # fmt: skip
EDITS: list[dict[str, Any]] = [
    {"a": 2}, {"a": None}, {"b.c": True, "b.g": "word"}, {"nested.d": "no"}, {"nested.e.f": 3, "nested.e.h": "4"},
    {"new": 1.5}, {"new.deep": False}, {"a": None, "b.c": None, "nested.h": 2},
]  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("settings", EDITS, ids=str)
def test_an_edit_is_the_setting_and_nothing_else(name: str, settings: dict[str, Any]) -> None:
    text, parse = TEXTS[name], parse_toml if name.endswith("toml") else parse_yaml
    after = edited(text, name, settings)
    kept = {key: value for key, value in settings.items() if value is not None}
    expected = yaml.safe_load(with_settings(text, name, kept))
    for path in settings.keys() - kept.keys():
        *parents, last = path.split(".")
        place = expected
        for parent in parents:
            place = place[parent]
        del place[last]
    found = parse(after) if not name.endswith("json") else yaml.safe_load(with_settings(after, name, {}))
    assert {key: value or None for key, value in found.items()} == {
        key: value or None for key, value in expected.items()
    }
    comments = [word for word in ("# head", "// head", "# why", "# before") if word in text]
    assert all(word in after for word in comments)


def test_a_script_is_edited_where_its_options_stand() -> None:
    script = "MBS=2\nARGS=(\n  --micro-batch-size $MBS # of a device\n  --recompute-modules core_attn moe\n)\n" \
             "# --bf16 is on\ntorchrun x/pretrain_gpt.py ${ARGS[@]} --bf16\n"  # fmt: skip
    changes = {"--micro-batch-size": 4, "--recompute-modules": None, "--sequence-parallel": True}
    assert edited(script, "run.sh", changes).splitlines() == [
        "MBS=2", "ARGS=(", "  --micro-batch-size 4 # of a device", "  ", ")", "# --bf16 is on",
        "torchrun x/pretrain_gpt.py --sequence-parallel ${ARGS[@]} --bf16",
    ]  # fmt: skip

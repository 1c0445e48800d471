"""The table of a job's fields."""

from __future__ import annotations

import pytest

from shardwise.spec.fields import FieldRecord, fields_of, flag_of, job_fields, keyword_paths, parts
from shardwise.spec.job import Job
from shardwise.spec.training import OPTIMIZERS, RECIPES


def record(path: str) -> FieldRecord:
    return job_fields()[path]


def test_each_field_has_a_line_of_documentation_and_each_flag_a_line_of_help() -> None:
    assert [path for path, field in job_fields().items() if not field.documentation.endswith(".")] == []
    helps = {path: field.help for path, field in job_fields().items() if field.flag}
    assert {path: text for path, text in helps.items() if not text or len(text) > 120 or "`" in text} == {}


@pytest.mark.parametrize(
    ("path", "flag", "keyword"),
    [
        ("strategy.zero", "--zero", "zero"),
        ("strategy.sequence_parallel", "--no-sp", "sequence_parallel"),
        ("strategy.keep_parameters", "", "keep_parameters"),
        ("strategy.overlap.tp", "", ""),
        ("run.memory_risk", "--memory-risk", "memory_risk"),
        ("run.steps", "", ""),
        ("cluster", "--cluster", "cluster"),
        ("gpus", "--gpus", "gpus"),
        ("no.such.field", "", ""),
    ],
)
def test_a_path_has_a_flag_and_a_keyword(path: str, flag: str, keyword: str) -> None:
    keywords = {path: keyword for keyword, path in keyword_paths().items()}
    assert (flag_of(path), keywords.get(path, "")) == (flag, keyword)


def test_flags_and_keywords_are_unambiguous() -> None:
    flags = [field.flag for field in job_fields().values() if field.flag]
    keywords = [field.keyword for field in job_fields().values() if field.keyword]
    assert len(set(flags)) == len(flags)
    assert len(set(keywords)) == len(keywords)
    assert not {*parts()} & {*keywords}
    assert keyword_paths()["global_batch"] == "training.global_batch"


def test_choices_come_from_the_tables_that_know_them() -> None:
    assert record("training.precision").choices == tuple(RECIPES)
    assert record("training.optimizer").choices == tuple(OPTIMIZERS)
    assert {"1f1b", "interleaved", "dualpipe"} <= {*record("strategy.schedule").choices}
    assert "llama3-8b" in record("model").choices
    assert record("strategy.order").choices == ("tp", "cp", "dp", "pp")
    assert record("strategy.tp").choices == ()


def test_the_kind_of_a_flag_follows_from_the_type() -> None:
    switches = [path for path, field in job_fields().items() if field.flag and field.is_switch]
    lists = [path for path, field in job_fields().items() if field.flag and field.is_list]
    assert switches == ["strategy.sequence_parallel", "training.dropout"]
    assert lists == ["strategy.order", "strategy.stage_layers"]


def test_help_is_the_first_sentence_and_the_choices_that_it_does_not_name() -> None:
    assert record("training.global_batch").help == "sequences per step, or tokens: 16M-tokens"
    assert record("strategy.recompute").help.endswith("or all of it (none, selective, full)")
    assert record("strategy.stage_layers").help.count("balanced") == 1
    assert "llama3-8b" not in record("model").help
    assert parts() == ("strategy", "training", "run")
    assert [field.path for field in fields_of(Job)] == ["model", "cluster", "strategy", "training", "stack", "run"]

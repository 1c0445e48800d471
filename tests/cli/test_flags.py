"""One word, one meaning: the flags of all verbs beside each other, the words they had before, and the help."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import pytest

from cli.running import error_line, run
from shardwise import api
from shardwise.api.quantities import OLD_WORDS, renamed
from shardwise.cli.explain import TOPICS
from shardwise.cli.main import MODULES, VERBS
from shardwise.cli.parser import DESCRIBE, FIRST, GROUPS, Described, Parser

PARTS = {
    "bench": ("collectives", "step", "parameter-server"),
    "explain": (*TOPICS, "all-reduce"),
}
COMMANDS = [[verb, *part] for verb in VERBS for part in ([name] for name in PARTS.get(verb, ()))] + [
    [verb] for verb in VERBS if verb not in PARTS
]
# Flags that take a value in some verbs only, and why.
SWITCH_IN_SOME = {"--nvtx": "`bench step` marks the steps that it times, `train` those that it is told"}


@cache
def parsers() -> dict[str, Parser]:
    """The parser of every verb and of every part of one."""
    found = {}
    for verb, *rest in COMMANDS:
        module = importlib.import_module(f"shardwise.cli.{MODULES.get(verb, verb)}")
        with pytest.raises(Described) as described:
            module.run([*rest, DESCRIBE])
        found[" ".join([verb, *rest])] = described.value.parser
    return found


def flags() -> dict[str, list[argparse.Action]]:
    """Every flag, and what it is in each verb that shows it."""
    table = defaultdict(list)
    for parser in parsers().values():
        for flag, action in parser._option_string_actions.items():
            if flag.startswith("--") and action.help != argparse.SUPPRESS:
                table[flag].append(action)
    return dict(table)


def meaning(action: argparse.Action) -> str:
    """The help without what is particular to a verb: its default, and what follows a semicolon."""
    return re.split(r"; | \(default|, default ", str(action.help))[0]


@pytest.mark.parametrize("flag", sorted(flags()))
def test_a_flag_has_one_meaning(flag: str) -> None:
    assert len({meaning(action) for action in flags()[flag]}) == 1, {action.help for action in flags()[flag]}
    assert None not in {action.help for action in flags()[flag]}
    takes_value = {action.nargs != 0 for action in flags()[flag]}
    assert (len(takes_value) == 1) != (flag in SWITCH_IN_SOME), "a switch here, a value there"


def test_a_meaning_has_one_flag() -> None:
    by_meaning, by_letters = defaultdict(set), defaultdict(set)
    for flag, actions in flags().items():
        by_meaning[meaning(actions[0])].add(flag)
        by_letters[flag.replace("-", "")].add(flag)
    assert [same for same in (*by_meaning.values(), *by_letters.values()) if len(same) > 1] == []


def test_an_action_has_one_long_name() -> None:
    for name, parser in parsers().items():
        for action in parser._actions:
            assert len([flag for flag in action.option_strings if flag.startswith("--")]) <= 1, (name, action)


OLD = [
    (name, old, new)
    for name, parser in parsers().items()
    for old, new in renamed(name).items()
    if f"--{new}" in parser._option_string_actions
]


def test_every_old_word_is_known_to_a_verb() -> None:
    assert {(old, new) for words in OLD_WORDS.values() for old, new in words.items()} == {
        (old, new) for _, old, new in OLD
    }


@pytest.mark.parametrize(("name", "old", "new"), OLD)
def test_an_old_word_still_works(name: str, old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = parsers()[name]
    assert f"--{old}" not in parser._option_string_actions
    assert f"--{old} " not in parser.format_help()
    named = {"?": [], None: ["x"], "+": ["x"]}
    before = [word for action in parser._actions if not action.option_strings for word in named[action.nargs]]
    if "what" in {action.dest for action in parser._actions}:
        before[0] = "build" if name == "data" else "collectives"
    for words, today in (([f"--{old}", "3"], [f"--{new}", "3"]), ([f"--{old}=3"], [f"--{new}=3"])):
        value = "cpu" if new == "run-device" else "3"
        words, today = ([word.replace("3", value) for word in both] for both in (words, today))
        assert vars(parser.parse([*before, *words])) == vars(parser.parse([*before, *today]))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [f"note: --{old} is now --{new}"] * 2


def test_an_old_word_says_so_on_standard_error_alone() -> None:
    new = run("explain", "all-reduce", "--gpus", "4")
    old = run("explain", "all-reduce", "--n", "4")
    assert (old.status, old.out) == (0, new.out)
    assert old.err == "note: --n is now --gpus\n"


def test_an_old_word_of_another_verb_is_unknown() -> None:
    assert "unknown argument '--batch'" in error_line(run("list", "models", "--batch", "3"))


def test_an_old_keyword_still_works() -> None:
    job = {"model": "tiny", "cluster": "laptop:2", "seq": 64}
    with pytest.warns(DeprecationWarning, match="batch= is now global_batch=") as told:
        old = api.analyze(**job, batch=8)
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert api.analyze(**job, global_batch=8).to_dict() == old.to_dict()
    with pytest.raises(api.SpecError, match="batch: is now global_batch, and both are given"):
        api.analyze(**job, batch=8, global_batch=8)


@pytest.mark.parametrize(("verb", "function"), [("generate", api.generate), ("report", api.write_report)])
def test_keywords_have_the_words_of_flags(verb: str, function: Callable[..., object]) -> None:
    own = {name.replace("_", "-") for name in inspect.signature(function).parameters}
    assert {*OLD_WORDS[verb].values()} <= own
    assert not {*OLD_WORDS[verb]} & own


@pytest.mark.parametrize("name", sorted(parsers()))
def test_help_shows_the_flags_used_most_and_uniform_groups(name: str) -> None:
    parser = parsers()[name]
    titles = [str(group.title) for group in parser._action_groups[1:]]
    assert set(titles) <= set(GROUPS)
    text = parser.format_help()
    printed = [line.removesuffix(":") for line in text.splitlines() if line.removesuffix(":") in (FIRST, *GROUPS)]
    assert printed == [title for title in (FIRST, *GROUPS) if title in printed]
    assert len(parser.first) <= 10
    assert (FIRST in printed) == bool(parser.first)
    assert parser.first or sum(action.help != argparse.SUPPRESS for action in parser._actions) <= 16
    for flag in parser._option_string_actions:
        wanted = parser._option_string_actions[flag].help != argparse.SUPPRESS
        assert len(re.findall(rf"^  (?:-\w.*, )?{flag}(?![\w-])", text, re.M)) == int(wanted), flag


@pytest.mark.parametrize("verb", ["train", "verify", "dryrun", "export", "doctor", "bench step"])
def test_bare_numbers_are_for_verbs_that_price_them(verb: str) -> None:
    line = error_line(run(*verb.split(), "--params", "7e9"))
    assert line.startswith("--params: bare numbers are priced, not run: they are for plan, analyze, explain, report")
    assert "--params" not in parsers()[verb].format_help()
    assert "--params" in parsers()["analyze"].format_help()

"""`shardwise completion`: a script that completes verbs, flags and values in a shell, made from the verbs' parsers."""

from __future__ import annotations

import argparse
import importlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from shardwise.cli.arguments import FieldAction
from shardwise.cli.main import MODULES, VERBS
from shardwise.cli.parser import DESCRIBE, Described, Parser
from shardwise.spec.errors import SpecError

SHELLS = ("bash", "zsh", "fish")
_EXAMPLE = """
shardwise completion bash > ~/.local/share/bash-completion/completions/shardwise
shardwise completion zsh >> ~/.zshrc
shardwise completion fish > ~/.config/fish/completions/shardwise.fish
"""


@dataclass(frozen=True)
class Flag:
    name: str
    help: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True)
class Words:
    verb: str
    first: tuple[str, ...]
    flags: tuple[Flag, ...]


def run(arguments: list[str]) -> int:
    parser = Parser("completion", "Prints a script that completes verbs, flags and values in your shell.", _EXAMPLE)
    parser.add_argument("shell", choices=SHELLS)
    parsed = parser.parse(arguments)
    verbs = [words_of(verb) for verb in VERBS]
    print(_fish(verbs) if parsed.shell == "fish" else _bash(verbs, zsh=parsed.shell == "zsh"))
    return 0


def words_of(verb: str) -> Words:
    module = importlib.import_module(f"shardwise.cli.{MODULES.get(verb, verb)}")
    first = tuple(getattr(module, "WHAT", ()))
    flags: dict[str, Flag] = {}
    for before in ((), *((word,) for word in first)):  # some first words have flags of their own
        for action in _actions(module, before):
            if not action.option_strings:
                first = first or tuple(map(str, action.choices or ()))
            flags |= {flag: _flag(flag, action) for flag in action.option_strings if flag.startswith("--")}
    return Words(verb, first, tuple(flags.values()))


def _actions(module: ModuleType, before: tuple[str, ...]) -> list[argparse.Action]:
    try:
        module.run([*before, DESCRIBE])
    except Described as described:
        return described.parser.actions
    except SpecError:  # a verb without flags of its own, only of its first words
        pass
    return []


def _flag(name: str, action: argparse.Action) -> Flag:
    field = action.record if isinstance(action, FieldAction) else None
    values = tuple(action.choices or ()) if field is None else (*field.metadata.get("words", ()), *field.choices)
    return Flag(name, (action.help or "").replace("%%", "%"), action.nargs != 0, tuple(map(str, values)))


_BASH = """# Completes the words of shardwise; made by `shardwise completion`.
_shardwise() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
    local first="" flags="" values=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{verbs}" -- "$current"))
        return
    fi
    case "$verb" in
{flags}
    esac
    case "$verb $before" in
{values}
    esac
    [[ "$current" == -* ]] && values="$flags"
    [ -z "$values" ] && [ "$COMP_CWORD" -eq 2 ] && values="$first"
    COMPREPLY=($(compgen -W "$values" -- "$current"))
    [ "${{#COMPREPLY[@]}}" -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _shardwise shardwise"""


def _bash(verbs: Iterable[Words], *, zsh: bool) -> str:
    """zsh takes bash's functions."""
    flags, where = [], defaultdict(list)
    for words in verbs:
        names = " ".join(flag.name for flag in words.flags)
        flags.append(f'        {words.verb}) first="{" ".join(words.first)}" flags="{names}" ;;')
        for flag in words.flags:
            if flag.values:
                where[" ".join(flag.values)].append(f'"{words.verb} {flag.name}"')
    values = [f'        {"|".join(places)}) values="{chosen}" ;;' for chosen, places in where.items()]
    script = _BASH.format(verbs=" ".join(VERBS), flags="\n".join(flags), values="\n".join(values))
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if zsh else script


def _fish(verbs: Iterable[Words]) -> str:
    lines = ["# Completes the words of shardwise; made by `shardwise completion`."]
    for verb, does in VERBS.items():
        lines.append(f"complete -c shardwise -n __fish_use_subcommand -a {verb} -d {_quoted(does)}")
    for words in verbs:
        seen = f"complete -c shardwise -n '__fish_seen_subcommand_from {words.verb}'"
        lines += [f"{seen} -a {_quoted(' '.join(words.first))}"] if words.first else []
        for flag in words.flags:
            value = f" -x -a {_quoted(' '.join(flag.values))}" if flag.values else " -r" if flag.takes_value else ""
            lines.append(f"{seen} -l {flag.name[2:]}{value} -d {_quoted(flag.help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

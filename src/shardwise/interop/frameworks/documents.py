"""The targets' file formats as flat settings by dotted path: ``{"zero_optimization.stage": 1}``, and back to text.

An empty section is kept as a setting with the value ``{}``.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.interop.keys import unflatten
from shardwise.interop.launches import environment_of
from shardwise.interop.recognise import suffix_of
from shardwise.interop.shell import Unset, python_command
from shardwise.interop.shell_words import Malformed
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import dump_yaml, parse_json, parse_toml, parse_yaml

# -- The option names of one version of a framework, recorded in ``options/<framework>.txt``
# A file has a line ``# version:`` and a line ``# source:``, then one name per line. ``section.*`` stands for anything
# below the section; a name that ends in ``!`` is a switch without a value; ``name = value`` (JSON) states its default,
# which nobody needs to be told of. ``# ignored:`` lists patterns of settings that do not affect cost and are not
# reported as unused, under the reason.

_FOLDER = Path(__file__).parent / "options"


@dataclass(frozen=True)
class Names:
    """All names that a version of a framework knows."""

    version: str
    source: str
    exact: frozenset[str]
    open_sections: tuple[str, ...]
    switches: frozenset[str]
    without_effect: tuple[str, ...]
    defaults: Mapping[str, str]  # as JSON

    def __contains__(self, name: str) -> bool:
        return name in self.exact or name.startswith(self.open_sections)

    def is_section(self, name: str) -> bool:
        section = name + "."
        return section in self.open_sections or any(known.startswith(section) for known in self.exact)

    def ignores(self, name: str) -> bool:
        """Whether a setting does not affect cost."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.without_effect)

    def is_default(self, name: str, value: object) -> bool:
        return self.defaults.get(name) == json.dumps(value, default=str)

    def check(self, name: str, value: object) -> None:
        """Raises SpecError for an unknown name, with the nearest known one, or for a value in place of a section."""
        if name in self:
            return
        if self.is_section(name):
            if value not in ({}, None):  # an empty section is valid
                raise SpecError(name, f"{shown(value)} should be a mapping of settings", f"see {self.version}")
        else:
            remedy = nearest_name(name, self.exact) or f"{self.version} does not know it"
            raise SpecError(name, f"is not a setting of {self.version}", remedy)


@functools.cache
def recorded(framework: str) -> Names:
    """The names recorded for a framework."""
    lines = (_FOLDER / f"{framework}.txt").read_text(encoding="utf-8").splitlines()
    comments = [line.partition(":") for line in lines if line.startswith("# ")]
    header = {name: text.strip() for name, _, text in comments}
    pairs = [line.strip().partition(" = ") for line in lines if line.strip() and not line.startswith("#")]
    given = [name for name, _, _ in pairs]
    return Names(
        version=header["# version"],
        source=header["# source"],
        exact=frozenset(name.rstrip("!") for name in given if not name.endswith(".*")),
        open_sections=tuple(name.removesuffix("*") for name in given if name.endswith(".*")),
        switches=frozenset(name.rstrip("!") for name in given if name.endswith("!")),
        without_effect=tuple(name for line in lines if line.startswith("# ignored:") for name in line.split()[2:]),
        defaults={name: value for name, stated, value in pairs if stated},
    )


# -- flat settings and their text --------------------------------------------------------------------

Settings = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How text becomes settings and back; ``suffixes`` of its files, the one that is written first."""

    suffixes: tuple[str, ...]
    parse: Callable[[str, str, Names], Settings]
    render: Callable[[Settings, Names], str]


def flatten(tree: Any, what: str, prefix: str = "") -> Settings:
    """The nested mapping ``tree`` as settings; raises SpecError if it is not a mapping."""
    if not isinstance(tree, Mapping):
        raise SpecError(what, f"{shown(tree)} should be a mapping of settings", f"give a whole {what}")
    flat: Settings = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, what, path + "."))
        else:
            flat[path] = value
    return flat


# -- JSON, with comments ------------------------------------------------------------------------------------

# Text or a comment without its end goes to that of the line or file: every character is looked at once.
_JSON_PART = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|,(?=\s*[}\]])', re.DOTALL)


def without_comments(text: str) -> str:
    """JSON without ``//``, ``#`` and ``/* */`` comments and without commas before a closing bracket."""
    for _ in range(2):  # a comma may come before a comment
        text = _JSON_PART.sub(lambda match: match.group() if match.group().startswith('"') else " ", text)
    return text


JSON = Format(
    (".json",),
    lambda text, what, names: flatten(parse_json(without_comments(text), what, unique=True), what),
    lambda settings, names: json.dumps(unflatten(settings), indent=2) + "\n",
)


# -- YAML and TOML ------------------------------------------------------------------------------------------


YAML = Format(
    (".yaml", ".yml"),
    lambda text, what, names: flatten(parse_yaml(text, what), what),
    lambda settings, names: f"# {names.version}\n" + dump_yaml(unflatten(settings)),
)


def _render_toml(settings: Settings, names: Names) -> str:
    sections: dict[str, list[str]] = {}
    for path, value in settings.items():
        section, _, key = path.rpartition(".")
        # JSON writes numbers, true, false, text and lists of them as TOML does.
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    blocks = ("\n".join([f"[{section}]", *lines]) for section, lines in sections.items())
    return f"# {names.version}\n\n" + "\n\n".join(blocks) + "\n"


def with_settings(text: str, name: str, settings: Settings) -> str:
    """A configuration with other settings over its own, by dotted path, as JSON, which its parser reads as well."""
    suffix = suffix_of(text, name)
    # Hydra's choice of a group (`engine=fsdp`) stands beside settings in it.
    settings = {path: value for path, value in settings.items()
                if not any(other.startswith(f"{path}.") for other in settings)}  # fmt: skip
    if suffix == ".json":
        tree = parse_json(without_comments(text), name)
    else:
        tree = parse_toml(text, name) if suffix == ".toml" else parse_yaml(text, name)
    kept = {
        key: value for key, value in flatten(tree or {}, name).items()
        if not any(key.startswith(f"{path}.") or path.startswith(f"{key}.") for path in settings)
    }  # fmt: skip
    try:
        return json.dumps(unflatten({**kept, **settings}), default=str)
    except (TypeError, AttributeError):
        raise SpecError(
            name, "and what the script sets beside it contradict each other", "put all settings in the file"
        ) from None


TOML = Format((".toml",), lambda text, what, names: flatten(parse_toml(text, what), what), _render_toml)


# -- command lines ------------------------------------------------------------------------------------------


_LONGEST_SCRIPT = 2**17  # characters; those that are published have a few thousand
OUTSIDE = "$"  # no option's name: variables that may hold more options, which only the outside knows
_LEFT_OUT = ("...", "…", "[...]")


def _parse_command(text: str, what: str, names: Names) -> Settings:
    """The options of a command line or script; of ``torchrun ... script.py ...`` only those after the script."""
    words = command_words(text, what)
    if words and words[0].endswith(".py"):
        words = words[1:]
    settings: Settings = {}
    option, outside = "", list[str]()
    for word in words:
        if word in _LEFT_OUT:
            raise SpecError(what, f"{word} stands for options that are left out", "write them instead of it")
        if re.match(r"--[A-Za-z]", word):
            option, equals, value = word.partition("=")
            settings[option] = [Unset(value) if isinstance(word, Unset) else value] if equals else []  # the last counts
        elif isinstance(word, Unset) and (not option or option in names.switches or settings[option]):
            outside.append(word)  # more options, if the script is given any
        elif option in names.switches:
            raise SpecError(option, f"takes no value, but {shown(word)} follows", "leave that out")
        elif option:
            settings[option].append(word)
        else:
            raise SpecError(what, f"{shown(word)} is not an option", "start with one, like --num-layers 32")
    read = {name: _command_value(name, values, names) for name, values in settings.items()}
    return {**read, **({OUTSIDE: outside} if outside else {})}


def command_words(text: str, what: str) -> list[str]:
    """What a script gives to Python, the name of its script first, if there is one; raises SpecError."""
    if len(text) > _LONGEST_SCRIPT:
        problem = f"{len(text):,} characters are too many for a script"
        raise SpecError(what, problem, "name the script that starts pretrain_gpt.py")
    try:
        words = python_command(text, environment_of(text))
    except Malformed as error:
        raise SpecError(what, f"malformed command line: {error}", "close the quotes") from None
    said = any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())
    if said and not (words and (words[0].startswith("-") or words[0].endswith(".py"))):
        problem = "gives no options to a Python script, and holds none"
        raise SpecError(what, problem, "name the script that starts pretrain_gpt.py")
    return words


def _command_value(name: str, values: list[str], names: Names) -> Any:
    if name in names.switches:
        return True
    if not values and name in names and not names.ignores(name):
        raise SpecError(name, "has no value", "write one after it")
    return values[0] if len(values) == 1 else values


def _render_command(settings: Settings, names: Names) -> str:
    lines = [f"# {names.version}"]
    for name, value in settings.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        lines.append(" ".join([name, *(shlex.quote(str(item)) for item in values)]))
    return "\n".join(lines) + "\n"


COMMAND = Format((".args", ".sh", ".txt"), _parse_command, _render_command)

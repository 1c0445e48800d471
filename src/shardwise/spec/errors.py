"""The one error a user's mistake raises: where, what, and what would fix it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Self

# How the texts of errors name a setting: ⟨gpus⟩, ⟨gpus=64⟩, ⟨any_priced=true⟩, ⟨run.start_from=FOLDER⟩.
_SETTING = re.compile(r"⟨([\w.]+)(?:=([^⟩]*))?⟩")
_NO_TEXT = re.compile(r"[\d.]+|[A-Z]+|\.\.\.|\[.*\]")  # a number, FILE, "...", a list
_FLAGS = {"framework": "for", "any_priced": "any", "unfolded": "all"}  # where the name is not the keyword's


def in_python(text: str) -> str:
    """A text with keywords for settings: ``gpus``, ``gpus=64``, ``on="ray"``, ``search=False``."""
    return _SETTING.sub(lambda mark: _keyword(mark[1], mark[2]), text)


def in_flags(text: str) -> str:
    """A text with flags for settings: ``--gpus``, ``--gpus 64``, ``--no-search``, ``--set run.seed=5``."""
    return _SETTING.sub(lambda mark: _flag(mark[1], mark[2]), text)


def _keyword(name: str, value: str | None) -> str:
    if value is None:
        return name
    if value in ("true", "false"):
        return f"{name}={value.capitalize()}"
    return f"{name}={value}" if _NO_TEXT.fullmatch(value) else f'{name}="{value}"'


def _flag(name: str, value: str | None) -> str:
    if "." in name:
        return f"--set {name}" if value is None else f"--set {name}={value}"
    flag = _FLAGS.get(name, name.replace("_", "-"))
    if value in ("true", "false"):
        return f"--{flag}" if value == "true" else f"--no-{flag}"
    return f"--{flag}" if value is None else f"--{flag} {value}"


class SpecError(ValueError):
    """A mistake in what the user wrote.

    ``field`` is the dotted path of the value (``strategy.tp``), ``problem`` says what is wrong with
    it and names the value, ``remedy`` says what would fix it. Its text is always one line.

    All three name options of a verb, and settings that have a keyword, as ``⟨max_memory⟩`` or ``⟨gpus=64⟩``: the
    command line says ``--gpus 64``, others ``gpus=64``.
    """

    status = 2  # of the command that it ends

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        self.field = field
        self.problem = problem
        self.remedy = remedy
        super().__init__(field, problem, remedy)

    def __str__(self) -> str:
        return in_python(self.line)

    @property
    def line(self) -> str:
        """Its text, with the marks of settings, for a surface to word."""
        text = f"{self.field}: {self.problem}" if self.field else self.problem
        return " ".join((f"{text}; {self.remedy}" if self.remedy else text).split())

    def worded(self) -> Self:
        """The same mistake in the words of the Python API."""
        return type(self)(in_python(self.field), in_python(self.problem), in_python(self.remedy))

    def under(self, prefix: str) -> Self:
        """The same mistake, seen from the enclosing document."""
        if not prefix:
            return self
        return type(self)(join_path(prefix, self.field), self.problem, self.remedy)


class DoesNotFit(SpecError):
    """What was written is right, but the devices have no room for it."""

    status = 1


def join_path(prefix: str, field: str) -> str:
    if not prefix or not field:
        return prefix or field
    return f"{prefix}{field}" if field.startswith("[") else f"{prefix}.{field}"


def shown(value: object, limit: int = 60) -> str:
    """A user's value as it is quoted in an error: short, and on one line; a long one keeps both its ends."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]  # as it is written in a file
    try:
        text = " ".join((repr(value) if isinstance(value, str) else str(value)).split())
    except (ValueError, RecursionError):  # a whole number of thousands of digits; lists nested without end
        return f"this {type(value).__name__}"
    text = text.replace("⟨", "\\u27e8")  # which only our own texts may hold
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[1 - limit // 2 :]}"


def nearest_name(wanted: str, known: Iterable[str]) -> str:
    """'did you mean ...' for a misspelt name, or the whole short list when nothing is near."""
    import difflib  # only needed on the way to an error message

    names = sorted(known)
    close = difflib.get_close_matches(wanted.lower(), names, n=3, cutoff=0.55)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if len(names) <= 12:
        return "choose one of " + ", ".join(names)
    return ""

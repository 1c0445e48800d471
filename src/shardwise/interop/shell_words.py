"""The words of a shell script as they are written, and the references inside of a word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


class Malformed(ValueError):
    """A script that no shell would take, or that would become too large."""


@dataclass(frozen=True)
class Word:
    """As it is written, with its quotes."""

    text: str


@dataclass(frozen=True)
class Array:
    """``NAME=(...)``, or ``NAME+=(...)`` which ``adds``."""

    name: str
    adds: bool
    words: tuple[str, ...]


@dataclass(frozen=True)
class Heredoc:
    body: str


Token = Word | Array | Heredoc | str  # a plain string is an operator

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"\d*[<>][<>&|]*[ \t]*")
# What a published script leaves to its reader, as in ``--data-path <Specify path> --fp16``: to a shell two
# redirections, the second of which would take the next option for a file.
_PLACEHOLDER = re.compile(r"<[^\s<>|&;(){}$'\"](?:[^<>|&;{}$'\"\n]*[^\s<>|&;{}$'\"])?>(?=[\s\\/]|\Z)")
_BLANK = " \t\r"
_BREAKS = frozenset(" \t\r\n;|&()<>")


def tokens(text: str) -> Iterator[Token]:
    """Words, arrays, operators and here-documents; comments and redirections are left out."""
    at, waiting = 0, list[str]()
    while at < len(text):
        if placeholder := _PLACEHOLDER.match(text, at):
            yield Word(_as_reference(placeholder))
            at = placeholder.end()
        elif text[at] in _BLANK:
            at += 1
        elif text.startswith(("\\\n", "\\\r\n"), at):
            at = text.index("\n", at) + 1
        elif text[at] == "#":
            at = _line_end(text, at)
        elif _REDIRECTION.match(text, at):
            at, delimiter = _redirection(text, at)
            waiting += [delimiter] if delimiter else []
        elif text[at] == "\n" and waiting:
            yield "\n"
            at += 1
            for delimiter in waiting:
                body, at = _heredoc(text, at, delimiter)
                yield Heredoc(body)
                yield "\n"
            waiting = []
        elif sign := next((operator for operator in _OPERATORS if text.startswith(operator, at)), ""):
            yield sign
            at += len(sign)
        else:
            token, at = _word_or_array(text, at)
            yield token


def _as_reference(placeholder: re.Match[str]) -> str:
    """A reference to no variable: what it holds is set outside the script."""
    return f'"${{{placeholder[0]}}}"'


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _redirection(text: str, at: int) -> tuple[int, str]:
    """Past a redirection with its file; and the word that ends a here-document, if it is one."""
    here = re.compile(r"\d*<<-?[ \t]*(['\"]?)(\w+)\1").match(text, at)
    if here is not None:
        return here.end(), here[2]
    target = _REDIRECTION.match(text, at)
    assert target is not None
    at = target.end()
    is_file = at < len(text) and text[at] not in _BREAKS and not text.startswith("--", at)
    return (word_end(text, at) if is_file else at), ""


def _heredoc(text: str, at: int, delimiter: str) -> tuple[str, int]:
    end = re.compile(rf"^[ \t]*{delimiter}[ \t\r]*$", re.MULTILINE).search(text, at)
    return (text[at:], len(text)) if end is None else (text[at : end.start()], end.end())


def _word_or_array(text: str, at: int) -> tuple[Token, int]:
    array = _ARRAY.match(text, at)
    if array is not None and text.startswith("(", array.end()):
        words, end = _array_words(text, array.end() + 1)
        return Array(array[1], bool(array[2]), words), end
    end = word_end(text, at)
    return Word(text[at:end]), end


def _array_words(text: str, at: int) -> tuple[tuple[str, ...], int]:
    words: list[str] = []
    while at < len(text):
        if placeholder := _PLACEHOLDER.match(text, at):
            words.append(_as_reference(placeholder))
            at = placeholder.end()
        elif text.startswith(("\\\n", "\\\r\n"), at):
            at = text.index("\n", at) + 1
        elif text[at] in _BLANK + "\n":
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        elif text[at] == ")":
            return tuple(words), at + 1
        elif text[at] in _BREAKS:
            at += 1
        else:
            end = word_end(text, at)
            words.append(text[at:end])
            at = end
    raise Malformed("a list in parentheses is not closed")


def word_end(text: str, at: int) -> int:
    """Where the word that begins at ``at`` ends: at a break that is neither quoted nor inside of a reference."""
    begin = at
    while at < len(text) and text[at] not in _BREAKS:
        if text[at] == "\\":
            if text.startswith(("\\\n", "\\\r\n"), at):
                break
            at += 2
        elif text[at] in "'\"`":
            at = _quote_end(text, at)
        elif text[at] == "$":
            at = _reference_end(text, at)
        else:
            at += 1
    return min(max(at, begin + 1), len(text))


def _quote_end(text: str, at: int) -> int:
    quote = text[at]
    at += 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at] == "$":
            at = _reference_end(text, at)
        else:
            at += 2 if text[at] == "\\" and quote != "'" else 1
    if at >= len(text):
        raise Malformed("No closing quotation")
    return at + 1


_PAIRS = {"(": ")", "{": "}"}


def _reference_end(text: str, at: int) -> int:
    """Past ``$name``, ``${...}``, ``$(...)`` or ``$((...))``."""
    opened = text[at + 1 : at + 2]
    if opened not in _PAIRS:
        match = re.compile(r"\$(\w+|[@*#?$!-])?").match(text, at)
        assert match is not None
        name = match[1] or ""
        return at + 2 if name[:1].isdigit() else match.end()
    closing, depth, at = _PAIRS[opened], 0, at + 1
    while at < len(text):
        if text[at] in "'\"" and opened == "(":
            at = _quote_end(text, at)
            continue
        if text[at] == "\\":
            at += 1
        elif text[at] == opened:
            depth += 1
        elif text[at] == closing:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise Malformed(f"a {opened} is not closed")


@dataclass(frozen=True)
class WordPart:
    """Of a word: plain ``text``, or what stands behind a dollar sign (or between backticks)."""

    text: str = ""
    expression: str | None = None
    quoted: bool = False


def references(raw: str) -> Iterator[WordPart]:
    """The parts of a word, without its quotes."""
    at, quoted = 0, False
    while at < len(raw):
        sign = raw[at]
        if sign == '"':
            quoted = not quoted
            yield WordPart("", quoted=True)
            at += 1
        elif sign == "'" and not quoted:
            end = raw.find("'", at + 1)
            end = len(raw) if end < 0 else end
            yield WordPart(raw[at + 1 : end], quoted=True)
            at = end + 1
        elif sign == "\\":
            following = raw[at + 1 : at + 2]
            yield WordPart(
                "" if following == "\n" else following if not quoted or following in '$`"\\' else sign + following
            )
            at += 2
        elif sign in "$`":
            end = _reference_end(raw, at) if sign == "$" else _quote_end(raw, at)
            expression = raw[at + 1 : end] if sign == "$" else raw[at:end]
            yield WordPart(expression=expression, quoted=quoted) if expression else WordPart(sign)
            at = end
        else:
            end = at + 1
            while end < len(raw) and raw[end] not in "\"'\\$`":
                end += 1
            yield WordPart(raw[at:end])
            at = end


def unquoted_references(raw: str) -> Iterator[WordPart]:
    """The same of text in which quotes mean nothing."""
    at = 0
    while at < len(raw):
        end = min((place for sign in "$\\" if (place := raw.find(sign, at)) >= 0), default=len(raw))
        if end > at:
            yield WordPart(raw[at:end])
        if end == len(raw):
            return
        if raw[end] == "\\":
            following = raw[end + 1 : end + 2]
            yield WordPart(following if following in ("$", "`") else raw[end] + following)
            at = end + 2
        else:
            at = _reference_end(raw, end)
            expression = raw[end + 1 : at]
            yield WordPart(expression=expression) if expression else WordPart("$")

"""What a launch script would run, with its variables filled in: the script is read, never run.

This is the part of bash that launch scripts are written in: assignments, arrays, expansions, arithmetic, tests, `if`
and `case`. Loops and functions are passed over, commands print nothing, files exist. What comes from outside of the
script (its arguments, the environment, the output of a command) is not known here.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.interop.shell_words import (
    Array,
    Heredoc,
    Malformed,
    Token,
    Word,
    references,
    tokens,
    unquoted_references,
    word_end,
)

MOST_CHARACTERS = 2**20  # of all values: each line of a script could double them
_DEEPEST = 40  # commands inside of commands
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(?:\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SEPARATORS = ("\n", ";", ";;", "&&", "||", "|", "&")
_PRINTING = ("echo", "printf")
_HOLDS_A_COMMAND = re.compile(
    r"\.py\b|\b(?:python3? -m|torchrun|deepspeed|accelerate|axolotl|llamafactory-cli|tune|litgpt|trl)\s"
)


class Unset(str):
    """Text that depends on what only the outside knows, as the script has it: ``$1``."""

    __slots__ = ()


@dataclass
class _Scope:
    """Variables and what has been run so far."""

    values: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    characters: int = 0

    def count(self, text: str) -> str:
        self.characters += len(text) + 1
        if self.characters > MOST_CHARACTERS:
            raise Malformed(f"its variables hold more than {MOST_CHARACTERS:,} characters")
        return text


def commands_of(text: str, environment: Mapping[str, str]) -> tuple[list[list[str]], Mapping[str, list[str]]]:
    """The words of all commands that a script would run, and its variables at its end; raises `Malformed`."""
    scope = _Scope({name: [value] for name, value in environment.items()})
    _run(text, scope, 0)
    return _whole_commands(scope.commands), scope.values


def python_command(text: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """The words of the last command with options for a Python script, from the script on.

    Without one: all options that stand alone, then those that variables hold. Raises `Malformed`. ``environment`` is
    what is known of the variables that are set outside.
    """
    commands, variables = commands_of(text, environment or {})
    scripts = [words for command in commands if (words := _from_script(command))]
    with_options = [words for words in scripts if any(word.startswith("--") for word in words)]
    if with_options:
        return with_options[-1]
    plain = [command for command in commands if command[0].startswith("-")]
    kept = [value for value in variables.values() if value and value[0].lstrip().startswith("--")]
    held = [word for value in kept for text in value for word in _split(text)]
    if plain or held:
        return [word for command in plain for word in command] or held
    return scripts[-1] if scripts else [word for command in commands for word in command]


def _whole_commands(commands: Sequence[Sequence[str]]) -> list[list[str]]:
    """A line that begins with an option continues the one before: the backslash is forgotten often."""
    whole: list[list[str]] = []
    for words in commands:
        if whole and words and words[0].startswith("--"):
            whole[-1].extend(words)
        elif words:
            whole.append(list(words))
    return whole


def _from_script(words: Sequence[str]) -> list[str]:
    scripts = [at for at, word in enumerate(words) if re.fullmatch(r"[^-\s]\S*\.py", word)]
    return list(words[scripts[-1] :]) if scripts else []


# -- commands ------------------------------------------------------------------------------------------------


def _run(text: str, scope: _Scope, depth: int) -> None:
    if depth <= _DEEPEST:
        _Block(list(tokens(text)), scope, depth).run((), active=True)


class _Block:
    """The tokens of a script, walked from the first to the last: branches that are not taken are passed over."""

    def __init__(self, given: list[Token], scope: _Scope, depth: int) -> None:
        self.tokens, self.scope, self.depth, self.at = given, scope, depth, 0

    def run(self, ends: tuple[str, ...], *, active: bool, nested: int = 0) -> str:
        """Up to one of the words that end the block, which is passed and returned; "" at the end of the script."""
        if nested > _DEEPEST:
            raise Malformed("its blocks are nested too deeply")
        while self.at < len(self.tokens):
            word = self._word()
            if word in ends:
                self.at += 1
                return word
            if word == "if":
                self._if(active, nested)
            elif word == "case":
                self._case(active, nested)
            elif word in ("for", "while", "until", "select"):
                self._pass_to("do")
                self.run(("done",), active=False, nested=nested + 1)
            elif word == "function" or self.tokens[self.at + 1 : self.at + 3] == ["(", ")"]:
                self._pass_to("{")
                self.run(("}",), active=False, nested=nested + 1)
            elif word in (*_SEPARATORS, "(", ")", "{", "}", "then", "do", "!"):
                self.at += 1
            else:
                self._command(active)
        return ""

    def _word(self) -> str:
        token = self.tokens[self.at]
        return token.text if isinstance(token, Word) else str(token) if isinstance(token, str) else ""

    def _pass_to(self, wanted: str) -> None:
        while self.at < len(self.tokens):
            word = self._word()
            self.at += 1
            if word == wanted:
                return

    def _if(self, active: bool, nested: int) -> None:
        taken, ended = False, "elif"
        self.at += 1
        while ended == "elif":
            condition = self._tokens_to("then")
            holds = active and not taken and _holds(condition, self.scope)
            ended = self.run(("elif", "else", "fi"), active=holds, nested=nested + 1)
            taken = taken or holds
        if ended == "else":
            self.run(("fi",), active=active and not taken, nested=nested + 1)

    def _tokens_to(self, word: str) -> list[Token]:
        begin = self.at
        self._pass_to(word)
        return self.tokens[begin : self.at - 1]

    def _case(self, active: bool, nested: int) -> None:
        subject = _value(self._tokens_to("in")[1:], self.scope)
        taken = False
        while self.at < len(self.tokens) and self._word() != "esac":
            patterns = [token for token in self._tokens_to(")") if isinstance(token, Word)]
            matches = any(fnmatch.fnmatchcase(subject, _value([pattern], self.scope)) for pattern in patterns)
            chosen = active and matches and not taken
            if self.run((";;", "esac"), active=chosen, nested=nested + 1) != ";;":
                return
            taken = taken or chosen
            while self.at < len(self.tokens) and self._word() == "\n":
                self.at += 1
        self.at += 1

    def _command(self, active: bool) -> None:
        begin = self.at
        while self.at < len(self.tokens) and not isinstance(self.tokens[self.at], str):  # an operator
            self.at += 1
        if self.at == begin:
            self.at += 1
        elif active:
            _simple(self.tokens[begin : self.at], self.scope, self.depth)


def _simple(given: Sequence[Token], scope: _Scope, depth: int) -> None:
    """Assignments, or a command whose words may hold a script of their own (`bash -c`, a here-document)."""
    rest = list(given)
    if isinstance(rest[0], Word) and rest[0].text in _DECLARING:
        rest = [token for token in rest[1:] if not (isinstance(token, Word) and token.text.startswith("-"))]
    assigned = 0
    while assigned < len(rest) and _assigned(rest[assigned], scope):
        assigned += 1
    words: list[str] = []
    for token in rest[assigned:]:
        if isinstance(token, Heredoc) and scope.commands and scope.commands[-1][0] == "read":
            body = _filled(token.body, scope).replace("\\\n", " ")
            scope.values[scope.commands[-1][-1]] = [scope.count(body)]
        elif isinstance(token, Heredoc):
            _run_inside(_filled(token.body, scope), scope, depth)
        elif isinstance(token, Word):
            words += _fields(token.text, scope)
    if words[:1] == ["eval"]:
        _run_inside(" ".join(words[1:]), scope, depth)
        return
    for before, word in zip(["", *words], words) if words[:1] and words[0] not in _PRINTING else ():
        if (before == "-c" or _HOLDS_A_COMMAND.search(word)) and len(word.split()) > 1:
            _run_inside(word, scope, depth)
    if words:
        scope.commands.append([scope.count(word) for word in words])


def _assigned(token: Token, scope: _Scope) -> bool:
    if isinstance(token, Array):
        value = [field for word in token.words for field in _fields(word, scope)]
        name, adds = token.name, token.adds
    else:
        assignment = _ASSIGNMENT.fullmatch(token.text) if isinstance(token, Word) else None
        if assignment is None:
            return False
        name, adds, value = assignment[1], bool(assignment[2]), [_text(assignment[3], scope)]
        if adds and scope.values.get(name):
            value = [scope.values[name][0] + value[0]]
            adds = False
    scope.values[name] = [*(scope.values.get(name, []) if adds else []), *map(scope.count, value)]
    return True


def _run_inside(text: str, scope: _Scope, depth: int) -> None:
    """What a command is given to run; text that is not a script is left alone."""
    begin = len(scope.commands)
    try:
        _run(text, scope, depth + 1)
    except Malformed:
        del scope.commands[begin:]


# -- tests -----------------------------------------------------------------------------------------------------


def _holds(condition: Sequence[Token], scope: _Scope) -> bool:
    """Whether a condition is true; a command that only a machine could run is not."""
    result, joins, part = False, "||", list[Token]()
    for token in [*condition, ";"]:
        if token not in ("&&", "||", ";", "\n"):
            part.append(token)
            continue
        if part:
            holds = _test(part, scope)
            result = holds if joins in (";", "\n") else (result and holds) if joins == "&&" else (result or holds)
            part = [part[0]] if part[0] == Word("[[") and part[-1] != Word("]]") else []
            joins = str(token)
        elif token in ("&&", "||"):
            joins = str(token)
    return result


_FILES = ("-f", "-d", "-e", "-s", "-r", "-w", "-x", "-L", "-h")
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip


def _test(given: Sequence[Token], scope: _Scope) -> bool:
    words = ["" if isinstance(word, Unset) else word for word in (_value([token], scope) for token in given)]
    if words and words[0] == "!":
        return not _test(given[1:], scope)
    if not words or words[0] not in ("[", "[[", "test"):
        return False
    words = [word for word in words[1:] if word not in ("]", "]]")]
    if words and words[0] == "!":
        return not _compared(words[1:])
    return _compared(words)


def _compared(words: Sequence[str]) -> bool:
    match words:
        case [only]:
            return only != ""
        case ["-z", text]:
            return text == ""
        case ["-n", text]:
            return text != ""
        case [kind, text] if kind in _FILES:
            return text != ""
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, sign, right] if sign in _COMPARED and _whole(left) and _whole(right):
            return _COMPARED[sign](int(left), int(right))
    return False


def _whole(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,18}", text) is not None


# -- expansion -------------------------------------------------------------------------------------------------


def _value(given: Sequence[Token], scope: _Scope) -> str:
    return _text(" ".join(token.text for token in given if isinstance(token, Word)), scope)


def _text(raw: str, scope: _Scope) -> str:
    """Raw text with its references filled in, as one string."""
    text, unset = "", False
    for part in references(raw):
        values = [part.text] if part.expression is None else _referenced(part.expression, scope)
        text += " ".join(values)
        unset = unset or any(isinstance(value, Unset) for value in values)
        _bounded(text)
    return Unset(text) if unset else text


def _filled(raw: str, scope: _Scope) -> str:
    """Text with its references filled in and its quotes kept: that of a here-document."""
    text = ""
    for part in unquoted_references(raw):
        text += part.text if part.expression is None else " ".join(_referenced(part.expression, scope))
        _bounded(text)
    return text


class _Words:
    """Words being put together: the last one may still grow."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.open: str | None = None
        self.unset = False

    def add(self, text: str, unset: bool = False) -> None:
        self.open = (self.open or "") + text
        self.unset = self.unset or unset
        _bounded(self.open)

    def close(self) -> None:
        if self.open is not None:
            self.done.append(Unset(self.open) if self.unset else self.open)
        self.open, self.unset = None, False

    def add_split(self, text: str) -> None:
        """What is not quoted ends at every space."""
        if text[:1].isspace():
            self.close()
        for number, piece in enumerate(_split(text)):
            if number:
                self.close()
            self.add(piece, isinstance(piece, Unset))
        if text[-1:].isspace():
            self.close()


def _fields(raw: str, scope: _Scope) -> list[str]:
    """The words that a raw one becomes: what is not quoted is split at spaces, an array has one for each element."""
    words = _Words()
    for part in references(raw):
        if part.expression is None:
            if part.text or (part.quoted and not _only_an_array(raw)):
                words.add(part.text)
            continue
        values = _referenced(part.expression, scope)
        if part.quoted and "[@]" not in part.expression and part.expression != "@":
            values = [_as_one(values)]
        for number, value in enumerate(values):
            if number:
                words.close()
            if part.quoted:
                words.add(value, isinstance(value, Unset))
            else:
                words.add_split(value)
    words.close()
    return words.done


def _only_an_array(raw: str) -> bool:
    """An empty array in quotes is not a word, not even an empty one."""
    return raw.startswith('"${') and raw.endswith('[@]}"') and raw.count('"') == 2


def _as_one(values: list[str]) -> str:
    text = " ".join(values)
    return Unset(text) if any(isinstance(value, Unset) for value in values) else text


def _split(text: str) -> list[str]:
    """The words of a value; of one that is not known those are that hold what only the outside knows."""
    if not isinstance(text, Unset):
        return text.split()
    words, at, ended = list[str](), 0, True
    try:
        while at < len(text):
            end = at + 1 if text[at].isspace() else word_end(text, at)
            if not text[at].isspace():
                words[len(words) if ended else -1 :] = [("" if ended else words[-1]) + text[at:end]]
            at, ended = end, text[at].isspace()
    except Malformed:
        words = text.split()
    return [Unset(word) if re.search(r"[$`<>]", word) else word for word in words]


def _bounded(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise Malformed(f"a variable holds more than {MOST_CHARACTERS:,} characters")


_BRACED = re.compile(rf"({_NAME}|\d+|[@*#?])(\[[^]]*\])?(:?[-=+?]|[%#/,^:].*)?(.*)", re.DOTALL)


def _referenced(expression: str, scope: _Scope) -> list[str]:
    """The values of what follows a dollar sign: a name, ``{...}``, ``((...))`` or ``(...)``."""
    if expression.startswith("(("):
        return [_arithmetic(expression[2:-2], scope)]
    if expression == "#":
        return ["0"]  # the script has no arguments
    if expression.startswith(("(", "`")):
        return [Unset(f"${expression}" if expression[0] == "(" else expression)]
    inner = expression[1:-1] if expression.startswith("{") else expression
    if inner.startswith("<"):
        return [Unset(inner)]  # a placeholder
    if counted := re.fullmatch(rf"#({_NAME})(\[[@*]\])?", inner):
        held = scope.values.get(counted[1], [])
        return [str(len(held) if counted[2] else len("".join(held[:1])))]
    match = _BRACED.fullmatch(inner)
    if match is None:
        return [Unset(f"${expression}")]
    name, index, sign, word = match.groups()
    value = _element(None if name in "@*" else scope.values.get(name), index)
    known = value is not None and not any(isinstance(field, Unset) for field in value)
    if sign in (":-", "-", ":=", "="):
        empty = value == [] or (sign[0] == ":" and value == [""])
        return value if known and not empty and value is not None else _defaults(word, scope)
    if sign in (":+", "+"):
        return _defaults(word, scope) if known and value not in ([], [""]) else []
    if name in "@*":
        return []
    if value is None or (sign and sign[0] in "%#/,^:" and sign != ":?"):
        return [Unset(f"${expression}")]
    return value


def _element(value: list[str] | None, index: str | None) -> list[str] | None:
    if value is None or index in ("[@]", "[*]"):
        return value
    if index is None:
        return value[:1] or [""]
    number = index[1:-1]
    return [value[int(number)]] if number.isdigit() and int(number) < len(value) else None


def _defaults(word: str, scope: _Scope) -> list[str]:
    return [_text(word, scope)] if word else [""]


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right), ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _arithmetic(expression: str, scope: _Scope) -> str:
    unknown = Unset(f"$(({expression}))")

    def named(match: re.Match[str]) -> str:
        return (scope.values.get(match[1]) or [""])[0]

    text = re.sub(rf"\$?\{{?({_NAME})\}}?", named, expression.replace("\n", " ")).strip()
    if not re.fullmatch(r"[\d\s+\-*/%()]{1,200}", text) or re.search(r"\d{19}", text):
        return unknown
    try:
        return str(_calculated(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return unknown


def _calculated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_calculated(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_calculated(left), _calculated(right))
    raise ValueError

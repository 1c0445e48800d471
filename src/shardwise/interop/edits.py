"""Settings changed in the text of a configuration: comments, order and everything else stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from shardwise.interop.recognise import suffix_of
from shardwise.spec.errors import SpecError

Node = Any  # of yaml: its library has no types

_JSON_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")  # that YAML takes for other things


def edited(text: str, name: str, settings: Mapping[str, Any]) -> str:
    """The text of the file ``name`` with settings by dotted path; None removes one. Raises SpecError if it cannot."""
    edit = {".json": _in_json, ".toml": _in_toml, ".yaml": _in_yaml}.get(suffix_of(text, name).replace("yml", "yaml"))
    edit = _in_command if edit is None else edit
    for path, value in settings.items():
        text = edit(text, path, value)
    return text


def setting_words(path: str, value: Any) -> str:
    """A setting as a file has it: an option of a command line, or a key."""
    if value is None:
        return f"no {path}"
    if path.startswith("-"):
        return path if value is True else f"{path} {value}"
    return f"{path}: {str(value).lower() if isinstance(value, bool) else value}"


# -- YAML and JSON ---------------------------------------------------------------------------------------------------


def _in_yaml(text: str, path: str, value: Any) -> str:
    return _in_tree(text, text, path, value, _yaml_word)


def _in_json(text: str, path: str, value: Any) -> str:
    """JSON is YAML once its comments and tabs are blank, which keeps every place where it is."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _in_tree(text, _JSON_COMMENT.sub(blank, text).replace("\t", " "), path, value, json.dumps)


def _yaml_word(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value)


def _in_tree(text: str, plain: str, path: str, value: Any, written: Callable[[Any], str]) -> str:
    try:
        root = yaml.compose(plain, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        raise SpecError("", "cannot be changed in place: it is not plain YAML or JSON", "change it by hand") from None
    names, node, parent, place = path.split("."), root, root, 0
    if root is None:
        return text if value is None else f"{text.rstrip()}\n{_block(names, value, 0, written)}\n".lstrip()
    for depth, name in enumerate(names):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        place = next((at for at, (key, _) in enumerate(pairs) if _is(key.value, name)), -1)
        if place < 0:
            return text if value is None else _inserted(text, node, names[depth:], value, written)
        parent, node = node, pairs[place][1]
    if value is None:
        return _removed(text, parent, place)
    key = parent.value[place][0]
    begin, end = node.start_mark.index, _end(node)
    if begin == end:  # an empty value is null
        begin = end = text.index(":", key.end_mark.index) + 1
    gap = "" if text[begin - 1].isspace() else " "
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        begin, gap = text.index(":", key.end_mark.index) + 1, " "
    return text[:begin] + gap + written(value) + text[end:]


def _is(key: object, name: str) -> bool:
    return key == name or str(key).replace("-", "_") == name


def _end(node: Node) -> int:
    """Where the last character of a value is: the end of a block is known to the parser only by what follows."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", max(0, at - 1))
    return len(text) if end < 0 else end


def _block(names: list[str], value: Any, indent: int, written: Callable[[Any], str]) -> str:
    lines = [f"{' ' * (indent + 2 * depth)}{name}:" for depth, name in enumerate(names)]
    return "\n".join(lines) + f" {written(value)}"


def _inserted(text: str, node: Node, names: list[str], value: Any, written: Callable[[Any], str]) -> str:
    if not isinstance(node, yaml.MappingNode) or not node.value or node.flow_style:
        inner = value
        for name in reversed(names[1:]):
            inner = {name: inner}
        pair = f"{json.dumps(names[0])}: {json.dumps(inner)}"
        if not isinstance(node, yaml.MappingNode):  # a section that is empty, or a word such as auto
            begin, end = node.start_mark.index, node.end_mark.index
            return f"{text[:begin]}{'' if text[begin - 1].isspace() else ' '}{{{pair}}}{text[end:]}"
        if not node.value:
            begin = node.start_mark.index + 1
            return f"{text[:begin]}{pair}{text[begin:]}"
        key, last = node.value[-1]
        before = text[text.rfind("\n", 0, key.start_mark.index) + 1 : key.start_mark.index]
        gap = f"\n{before}" if before.strip() == "" and "\n" in text[: key.start_mark.index] else " "
        return f"{text[: _end(last)]},{gap}{pair}{text[_end(last) :]}"
    end = _line_end(text, _end(node))
    return f"{text[:end]}\n{_block(names, value, node.value[0][0].start_mark.column, written)}{text[end:]}"


def _removed(text: str, parent: Node, at: int) -> str:
    key, value = parent.value[at]
    begin = key.start_mark.index
    if parent.flow_style:
        if at + 1 < len(parent.value):
            return text[:begin] + text[parent.value[at + 1][0].start_mark.index :]
        end = _end(value)
        if not at:  # the only one, perhaps with a comma behind it
            end += len(text[end:]) - len(re.sub(r"^\s*,", "", text[end:]))
        return text[: _end(parent.value[at - 1][1]) if at else begin] + text[end:]
    begin = text.rfind("\n", 0, begin) + 1
    return text[:begin] + text[_line_end(text, _end(value) or key.end_mark.index) + 1 :]


# -- TOML ------------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"\s*\[\s*([\w.-]+)\s*\]\s*(?:#.*)?")


def _in_toml(text: str, path: str, value: Any) -> str:
    section, _, name = path.rpartition(".")
    lines, current, last = text.split("\n"), "", -1 if section else 0
    pair = f"{name} = {json.dumps(value)}"
    for number, line in enumerate(lines):
        if header := _HEADER.fullmatch(line):
            current = header[1]
        if current == section and line.strip():
            last = number
        found = re.fullmatch(r"(\s*)([\w-]+)\s*=\s*(.*?)(\s*#[^\"']*)?", line)
        if current == section and found is not None and found[2] == name:
            changed = [] if value is None else [f"{found[1]}{pair}{found[4] or ''}"]
            return "\n".join(lines[:number] + changed + lines[number + 1 :])
    if value is None:
        return text
    if last < 0:
        return f"{text.rstrip()}\n\n[{section}]\n{pair}\n"
    return "\n".join([*lines[: last + 1], pair, *lines[last + 1 :]])


# -- command lines and scripts ---------------------------------------------------------------------------------------

_VALUE = r"(?:\"[^\"\n]*\"|'[^'\n]*'|\$\(\([^)\n]*\)\)|\$\{[^}\n]*\}|[^\s\\()\"'#-][^\s\\()\"']*)"


def _in_command(text: str, path: str, value: Any) -> str:
    """An option where it stands, or else behind the script that it is for; other words are not touched."""
    if not path.startswith("-"):  # key=value, whose program is not known here
        return re.sub(rf"(?<![\w.-]){re.escape(path)}={_VALUE}", lambda match: f"{path}={value}", text)
    words = [] if value in (True, None) else value if isinstance(value, list) else [value]
    option = "" if value is None else " ".join(map(str, [path, *words]))
    pattern = re.compile(rf"(?<![\w-]){re.escape(path)}(?![\w-])(?:[ \t=]+{_VALUE})*")
    lines = text.split("\n")
    found = False
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("#") and pattern.search(line):
            lines[number] = pattern.sub(lambda match: option, line)
            found = True
    if found or value is None:
        return "\n".join(lines)
    scripts = [number for number, line in enumerate(lines) if re.search(r"\.py\b", line.partition("#")[0])]
    if not scripts:
        return f"{text.rstrip()}\n{option}\n"
    lines[scripts[-1]] = re.sub(r"\.py\b[\"']?", lambda match: f"{match[0]} {option}", lines[scripts[-1]], count=1)
    return "\n".join(lines)

"""A strict reader of Prometheus' text format 0.0.4: what a scraper would refuse raises here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_HELP = re.compile(rf"# HELP ({_NAME}) (.*)")
_TYPE = re.compile(rf"# TYPE ({_NAME}) (counter|gauge|histogram|summary|untyped)")
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)(?: (-?\d+))?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"')
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?Inf|NaN")
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    kind: str = ""
    help: str = ""
    samples: dict[Labels, float] = field(default_factory=dict)

    def value(self, **labels: str) -> float:
        return self.samples[frozenset(labels.items())]


def parse(text: str) -> dict[str, Family]:
    """The families by name. Each has its help and type, once and before its samples, which are consecutive."""
    assert text.endswith("\n"), "the last line must end"
    found: dict[str, Family] = {}
    current = ""
    for line in text.splitlines():
        if help_line := _HELP.fullmatch(line):
            name = help_line[1]
            assert name not in found, f"{name} comes twice"
            found[name] = Family(help=_unescaped(help_line[2]))
            current = name
        elif type_line := _TYPE.fullmatch(line):
            assert type_line[1] == current and not found[current].kind and not found[current].samples, line
            found[current].kind = type_line[2]
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample, f"not a sample: {line!r}"
            name, labels, number = sample[1], sample[2], sample[3]
            assert name == current and found[name].kind, f"{name} stands under {current}"
            assert _NUMBER.fullmatch(number), line
            if found[name].kind == "counter":
                assert name.endswith("_total") and float(number) >= 0, line
            key = _labels(labels or "")
            assert key not in found[name].samples, f"the same labels twice: {line!r}"
            found[name].samples[key] = float(number)
    assert all(one.kind and one.help and one.samples for one in found.values())
    return found


def _labels(text: str) -> Labels:
    found, at = [], 0
    while at < len(text):
        label = _LABEL.match(text, at)
        assert label, f"not a label: {text[at:]!r}"
        found.append((label[1], _unescaped(label[2])))
        at = label.end()
        assert at == len(text) or text[at] == ",", text
        at += 1
    assert len({name for name, _ in found}) == len(found), text
    return frozenset(found)


def _unescaped(text: str) -> str:
    return re.sub(r'\\\\|\\"|\\n', lambda one: _ESCAPES[one[0]], text)

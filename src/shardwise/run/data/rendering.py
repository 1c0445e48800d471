"""The process that renders chat templates: ``python -m shardwise.run.data.rendering``, one line of JSON each way.

A template is a program of whoever published the tokenizer. It runs in Jinja's sandbox, which keeps it from what is
outside; that it ends, and what it may take, only a process of its own can bound: the kernel ends it after some seconds
of processor time (SIGPROF), and gives it no more memory (RLIMIT_AS).

What templates may use is what transformers gives them (`utils/chat_template_utils.py`): tags for loops and for
``{% generation %}``, ``raise_exception``, ``strftime_now`` and ``tojson``.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from shardwise.spec.files import IN_BULK, parse_json

MEMORY_BYTES = 512 * 2**20  # beyond what the process has at its start
_BYTES_PER_BYTE = 16  # and for each byte of a conversation: text of four bytes a character, and copies of it
LEAST_CHARACTERS = 2**20  # that may be rendered of a conversation, however short
CHARACTERS_PER_BYTE = 4
# Marks around answers while text is rendered: halves of characters, which no conversation here has.
_BEGIN, _END = "\ud800", "\udfff"


def main() -> None:
    """Answers requests until standard input ends; the first has the template."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that asks
    held = _address_space()
    template: Any = None
    for line in sys.stdin.buffer:
        try:
            request = parse_json(line, "request", most_values=IN_BULK)
            with _bounded(held, request["seconds"], len(line)):
                if template is None:
                    template = _compiled(request["template"])
                    answer: dict[str, Any] = {"compiled": True}
                else:
                    answer = {"rendered": [_rendered(template, request, part) for part in request["parts"]]}
        except MemoryError:
            answer = {"problem": f"needs more than {MEMORY_BYTES >> 20} MiB of memory"}
        except RecursionError:
            answer = {"problem": "calls itself without end"}
        except Exception as error:  # whatever a template does wrong
            place = f" in line {line_of}" if (line_of := getattr(error, "lineno", None)) else ""
            answer = {"problem": f"{str(error)[:200] or type(error).__name__}{place}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    except OSError:  # not on Linux, where the limit of the system holds
        return resource.RLIM_INFINITY


@contextmanager
def _bounded(held: int, seconds: float, request_bytes: int) -> Iterator[None]:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if held != resource.RLIM_INFINITY:
        wanted = held + MEMORY_BYTES + _BYTES_PER_BYTE * request_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    # The signal's own effect ends the process, also inside of one long operation.
    signal.setitimer(signal.ITIMER_PROF, seconds + request_bytes / 2**20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _compiled(source: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class _Marks(Extension):  # type: ignore[misc]
        """``{% generation %}`` around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _rendered(template: Any, request: dict[str, Any], part: list[Any]) -> dict[str, Any]:
    """The text of the first messages, with or without what asks for an answer, and where it marks answers."""
    first, asks = part
    given = {**request["words"], "messages": request["messages"][:first], "tools": request["tools"], "documents": None}
    pieces, held = [], 0
    for piece in template.generate(**given, add_generation_prompt=asks):
        held += len(piece)
        if held > request["most"]:
            raise ValueError(f"writes more than {request['most']:,} characters")
        pieces.append(piece)
    text, ranges = _without_marks("".join(pieces))
    return {"text": text, "ranges": ranges}


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    pieces, ranges, at = [], [], 0
    first, *others = marked.split(_BEGIN)
    pieces.append(first)
    at = len(first)
    for other in others:
        inside, mark, after = other.partition(_END)
        if not mark or _END in after:
            raise ValueError("marks answers inside of answers")
        ranges.append((at, at + len(inside)))
        pieces += [inside, after]
        at += len(inside) + len(after)
    text = "".join(pieces)
    if _END in text:
        raise ValueError("marks answers inside of answers")
    text.encode()
    return text, ranges


if __name__ == "__main__":
    main()

"""A tokenizer's chat template: where it is found, and how a conversation becomes text of which the answers count."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.interop.companions import TOOLS_TEMPLATE
from shardwise.run.data.conversations import Conversation
from shardwise.run.data.rendering import CHARACTERS_PER_BYTE, LEAST_CHARACTERS, MEMORY_BYTES
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, parse_json, read_json, read_text
from shardwise.spec.installation import require_packages

SECONDS = 10.0  # of processor time for a conversation; honest templates take milliseconds
_MOST_CHARACTERS = 2**20  # of a template; the longest published ones have 30,000
_CONFIGURATION, _SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
_OWN_FILES = ("chat_template.jinja", "chat_template.json", _CONFIGURATION)  # the first that has one, as transformers
_WORDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = "correct the record, or name another template: ⟨chat_template⟩"
_BY_MARKS = "write {% generation %} around its answers (⟨chat_template⟩), or learn the last alone: ⟨answers=last⟩"


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the tokens that it may write by name, and the file that it is from."""

    source: str
    words: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    with_tools: str | None = None  # the template for conversations with tools, where there is another

    @property
    def marks_answers(self) -> bool:
        return bool(_MARK.search(self.source))

    def of(self, conversation: Conversation) -> str:
        return self.with_tools if conversation.tools and self.with_tools else self.source


def template_beside(tokenizer: Path, given: str | None = None) -> ChatTemplate | None:
    """The chat template of a tokenizer's folder, or the one in the file ``given``; None if there is none."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    words = special_tokens(folder)
    if given is not None:
        path = Path(given)
        candidates = [path / name for name in _OWN_FILES] if path.is_dir() else [path]
        words = special_tokens(path) if path.is_dir() and not words else words
    else:
        candidates = [folder / name for name in _OWN_FILES]
    for path in candidates:
        if not path.is_file() and (given is None or len(candidates) > 1):
            continue
        held = _templates_in(path)
        if held:
            source = held.get("default") or next(iter(held.values()))
            return ChatTemplate(source, words, str(path), held.get("tool_use"))
    if given is not None:
        raise SpecError(
            "⟨chat_template⟩", f"{given} has no chat template", "name a .jinja file, or a tokenizer's folder"
        )
    return None


def _templates_in(path: Path) -> dict[str, str]:
    """The templates of a file by name; one that has no name is the default."""
    if path.suffix != ".json":
        beside = path.parent / TOOLS_TEMPLATE
        files = {"default": path, **({"tool_use": beside} if path.name == _OWN_FILES[0] and beside.is_file() else {})}
        return {name: read_text(file, "chat template", _MOST_CHARACTERS) for name, file in files.items()}
    document = read_json(path, "chat template")
    held = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(held, str):
        return {"default": held}
    entries = held if isinstance(held, list) else []
    try:
        templates = {str(entry["name"]): str(entry["template"]) for entry in entries}
    except (KeyError, TypeError):
        raise SpecError(str(path), "has a chat_template without name and template", "correct it") from None
    return templates


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that have a name (``eos_token``) in the files of a tokenizer."""
    named: dict[str, str] = {}
    for name in (_SPECIAL, _CONFIGURATION):
        document = read_json(folder / name, "tokenizer") if (folder / name).is_file() else {}
        for word in _WORDS:
            value = document.get(word) if isinstance(document, dict) else None
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[word] = text
    return named


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the ranges of its characters that the loss counts."""

    text: str
    counted: tuple[tuple[int, int], ...]


class Renderer:
    """Renders conversations by one template, in a process of its own."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def check(self) -> None:
        """Raises SpecError if the template is not a template."""
        for source in (self.template.source, self.template.with_tools):
            if source is not None:
                self._process(source)

    def __call__(self, conversation: Conversation) -> Rendered:
        if _MARK.search(self.template.of(conversation)):
            return self._by_marks(conversation)
        return self._by_roles(conversation)

    def close(self) -> None:
        for source in list(self._processes):
            self._end(source)

    def _by_marks(self, conversation: Conversation) -> Rendered:
        said, wanted = conversation.all_answers, conversation.answers
        text, ranges = self._render(conversation, [(len(conversation.messages), False)])[0]
        if wanted != said and len(ranges) != len(said):
            problem = f"marks {len(ranges)} answers of {len(said)}, so that it is not clear which to learn"
            raise self._refused(conversation, problem, "learn all: ⟨answers=all⟩")
        chosen = ranges if wanted == said else [ranges[said.index(place)] for place in wanted]
        counted = tuple((begin, end) for begin, end in chosen if end > begin)
        if not counted:
            raise self._refused(conversation, "marks no answer", _REMEDY)
        return Rendered(text, counted)

    def _by_roles(self, conversation: Conversation) -> Rendered:
        """What each answer adds to what was asked before it; the text up to there has to stay as it was."""
        last, answers = len(conversation.messages), conversation.answers
        parts = [(last, False), *((place + more, not more) for place in answers for more in (0, 1))]
        (text, _), *around = self._render(conversation, parts)
        counted = []
        for place, (asked, _), (answered, _) in zip(answers, around[::2], around[1::2]):
            if not answered.startswith(asked):
                problem = f"writes the answer in message {place + 1} otherwise than it asks for it"
                raise self._refused(conversation, problem, "write {% generation %} around its answers: ⟨chat_template⟩")
            if not text.startswith(answered):
                problem = f"writes the answer in message {place + 1} otherwise once more follows"
                raise self._refused(conversation, problem, _BY_MARKS)
            end = len(asked) + len(self._without_gap(answered[len(asked) :]))
            if end == len(asked):
                raise self._refused(conversation, f"writes nothing for the answer in message {place + 1}", _REMEDY)
            counted.append((len(asked), end))
        return Rendered(text, tuple(counted))

    def _without_gap(self, answer: str) -> str:
        """An answer without the white space between the token that ends it and the next turn: nobody generates it."""
        ended = answer.rstrip()
        token = self.template.words.get("eos_token")
        ends = (token, "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
        return ended if any(word and ended.endswith(word) for word in ends) else answer

    def _refused(self, conversation: Conversation, problem: str, remedy: str) -> SpecError:
        return SpecError(conversation.where, f"the chat template ({self.template.where}) {problem}", remedy)

    def _render(
        self, conversation: Conversation, parts: Sequence[tuple[int, bool]]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        source = self.template.of(conversation)
        body: dict[str, Any] = {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "words": self.template.words,
            "parts": parts,
        }
        size = len(json.dumps(body))
        body["most"] = LEAST_CHARACTERS + CHARACTERS_PER_BYTE * size
        answer = self._asked(self._process(source), source, body)
        if "problem" in answer:
            raise self._refused(conversation, f"refuses it: {answer['problem']}", _REMEDY)
        return [(str(part["text"]), [(int(a), int(b)) for a, b in part["ranges"]]) for part in answer["rendered"]]

    def _process(self, source: str) -> subprocess.Popen[bytes]:
        if source not in self._processes:
            require_packages(self.template.where, "jinja2")
            command = [sys.executable, "-m", "shardwise.run.data.rendering"]
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            self._processes[source] = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere)
            answer = self._asked(self._processes[source], source, {"template": source})
            if "problem" in answer:
                self._end(source)
                raise SpecError(self.template.where, f"is not a chat template: {answer['problem']}", "correct it")
        return self._processes[source]

    def _asked(self, process: subprocess.Popen[bytes], source: str, request: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps({**request, "seconds": SECONDS}).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line.endswith(b"\n"):
            answer: dict[str, Any] = parse_json(line, "rendered", most_values=IN_BULK)
            return answer
        self._end(source)
        if process.returncode == -signal.SIGPROF:
            return {"problem": f"it takes more than {SECONDS:g} s of processor time"}
        return {"problem": f"its process ended; it may have needed more than {MEMORY_BYTES >> 20} MiB of memory"}

    def _end(self, source: str) -> None:
        process = self._processes.pop(source, None)
        if process is not None:
            process.communicate()

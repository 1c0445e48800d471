"""Files of prompts, one JSON object per line, and the file of generated texts: a line for each, in the same order.

While it is written, the file lies in ``OUT.part`` together with the request; a run that was killed continues there, and
a single rename completes it. A batch that was not written completely is generated again, so that the result is the same
as without the interruption.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.generation.decoding import NextToken
from shardwise.generation.ranks import Clock, Emit, run_batch
from shardwise.generation.request import Generated, GenerationRequest, require_prompt
from shardwise.run.checkpoint.checkpoint_folder import sync_folder
from shardwise.run.data.token_files import Tokenizer, tokenizer_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import IN_BULK, bounded_lines, parse_json, read_json
from shardwise.spec.model import Model

# -- text that grows by a token at a time ------------------------------------------------------------

_UNFINISHED = "\ufffd"  # what a tokenizer shows for the first bytes of a character


class GrowingText:
    """``add`` returns what a token adds to the text after ``prompt``: nothing while a character is incomplete.

    A token may be decoded differently after others, such as with a space, so the tokens before it are decoded with it.
    Without a tokenizer the text is the tokens' numbers.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._from = 0  # the first token that is decoded again
        self._shown = self._prompt = len(prompt)  # the first that is not shown yet

    def add(self, token: int) -> str:
        self._tokens.append(token)
        if self._tokenizer is None:
            return str(token) if len(self._tokens) == self._prompt + 1 else f" {token}"
        before, now = self._decoded(self._shown), self._decoded(len(self._tokens))
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def rest(self) -> str:
        """What was held back until the end."""
        if self._tokenizer is None:
            return ""
        return self._decoded(len(self._tokens))[len(self._decoded(self._shown)) :]

    def _decoded(self, stop: int) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(self._tokens[self._from : stop])


def text_of(generated: Generated, tokenizer: Tokenizer | None) -> str | None:
    """The text generated after a prompt; None without a tokenizer."""
    if tokenizer is None:
        return None
    growing = GrowingText(tokenizer, generated.prompt)
    return "".join((*(growing.add(token) for token in generated.tokens), growing.rest()))


# -- files of prompts --------------------------------------------------------------------------------

_ABOUT, _LINES = "about.json", "lines.jsonl"
PROMPT, PROMPT_TOKENS, GENERATED = "prompt", "prompt_tokens", "generated"
_MOST_LINE_BYTES = 64 * 2**20
_WRITE = f'write {{"{PROMPT}": "..."}} or {{"{PROMPT_TOKENS}": [1, 2, 3]}}'


@dataclass(frozen=True)
class PromptRecord:
    """A line of the file of prompts."""

    fields: Mapping[str, Any]  # all fields of the line, which are returned with the text
    tokens: tuple[int, ...]  # the prompt

    def line(self, generated: Generated, tokenizer: Tokenizer | None) -> bytes:
        text = text_of(generated, tokenizer)
        made = {
            **({} if text is None else {"text": text}),
            "tokens": list(generated.tokens),
            "reason": generated.reason,
        }
        # A lone surrogate, which JSON may hold and UTF-8 may not, stays an escape.
        return (json.dumps({**self.fields, GENERATED: made}, ensure_ascii=False) + "\n").encode(
            "utf-8", "backslashreplace"
        )


def read_prompts(path: Path, tokenizer: Tokenizer | None, offset: int = 0) -> Iterator[tuple[str, PromptRecord]]:
    """Every prompt with its place (file, and line counted from ``offset``), skipping empty lines.

    Raises SpecError naming the place.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            for number, line in enumerate(bounded_lines(file, _MOST_LINE_BYTES), 1):
                if line is None:
                    problem = f"is longer than {_MOST_LINE_BYTES >> 20} MiB"
                    raise SpecError(f"{path}:{number}", problem, "one prompt on every line")
                if line.strip():
                    yield f"{path}:{number}", _record(line, tokenizer, f"{path}:{number}")
    except OSError as error:
        raise SpecError(str(path), f"cannot be read ({error.strerror})", "name a file of JSON lines") from None


def batch_offsets(path: Path, size: int) -> list[int]:
    """The byte at which each batch of prompts begins."""
    offsets, count, at = [], 0, 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                if count % size == 0:
                    offsets.append(at)
                count += 1
            at += len(line)
    return offsets


def _record(line: bytes, tokenizer: Tokenizer | None, where: str) -> PromptRecord:
    try:
        fields = parse_json(line, where, most_values=IN_BULK)
    except SpecError:
        raise SpecError(where, "is not JSON", "one object on every line") from None
    if not isinstance(fields, dict):
        raise SpecError(where, f"{shown(fields)} is not an object", _WRITE)
    tokens, text = fields.get(PROMPT_TOKENS), fields.get(PROMPT)
    if tokens is not None:
        if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
            raise SpecError(where, f"{PROMPT_TOKENS} is not a list of token ids", _WRITE)
        return PromptRecord(fields, tuple(tokens))
    if not isinstance(text, str):
        raise SpecError(where, f"has no {PROMPT}", _WRITE)
    if tokenizer is None:
        remedy = f"give {PROMPT_TOKENS}, or ⟨tokenizer=FILE⟩ (or bytes)"
        raise SpecError(where, "is text, and these weights come without a tokenizer.json", remedy)
    return PromptRecord(fields, tuple(prompt_tokens(text, tokenizer, where)))


def prompt_tokens(text: str, tokenizer: Tokenizer, where: str) -> list[int]:
    try:
        return tokenizer.encode_prompt(text)
    except (TypeError, UnicodeError):
        raise SpecError(where, "is not text (half of a surrogate pair)", "write Unicode") from None


@dataclass(frozen=True)
class PromptFile:
    """The work of reading prompts from ``data`` and writing texts to ``out``; emits how many are done."""

    data: str
    out: str
    tokenizer: str | None
    about: Mapping[str, Any]  # what a later run must have in common to continue this one

    def run(
        self, model: NextToken, request: GenerationRequest, clock: Clock, emit: Emit, leads: bool
    ) -> list[Generated]:
        tokenizer = None if self.tokenizer is None else tokenizer_from(self.tokenizer)
        part = PartialFile(Path(self.out), self.about)
        with part.opened() if leads else contextlib.nullcontext():
            done = model.same_number(part.whole_batches(request.batch) if leads else 0)
            records = (record for _, record in islice(read_prompts(Path(self.data), tokenizer), done, None))
            emit(done)
            while batch := list(islice(records, request.batch)):
                tokens = [record.tokens for record in batch]
                generated = run_batch(model, tokens, request, done, clock, lambda step: None)
                done += len(batch)
                if leads:
                    part.write(b"".join(record.line(text, tokenizer) for record, text in zip(batch, generated)))
                emit(done)
            if leads:
                part.complete()
        return []


def surveyed(path: Path, tokenizer: Tokenizer | None, model: Model, request: GenerationRequest) -> tuple[int, str]:
    """How many prompts a file has, and its checksum; raises SpecError for the first unusable prompt."""
    number = 0
    for where, record in read_prompts(path, tokenizer):
        require_prompt(model, record.tokens, request, where)
        number += 1
    if number == 0:
        raise SpecError(str(path), "has no prompts", _WRITE)
    with path.open("rb") as file:
        return number, hashlib.file_digest(file, "sha256").hexdigest()


class PartialFile:
    """Lines on their way to ``out``."""

    def __init__(self, out: Path, about: Mapping[str, Any]) -> None:
        self.out, self.about = out, json.loads(json.dumps(about))
        self.folder = out.with_name(f"{out.name}.part")
        self._file: int | None = None

    def check(self) -> None:
        """Raises SpecError if the file exists, or its folder holds another request's lines or is in use."""
        if self.out.exists() or self.out.is_symlink():
            raise SpecError("⟨out⟩", f"{self.out} is already there", "name another file, or remove it")
        if not self.out.absolute().parent.is_dir():
            raise SpecError("⟨out⟩", f"{self.out.parent} is not a folder", "create it")
        if not self.folder.exists():
            return
        try:
            before = read_json(self.folder / _ABOUT, "request", most_values=IN_BULK)
        except SpecError:
            before = None
        if not isinstance(before, dict):
            raise SpecError("⟨out⟩", f"{self.folder} is not a file on its way to {self.out}", "remove it")
        other = next((name for name in self.about if before.get(name) != self.about[name]), None)
        if other is not None:
            was, now = shown(before.get(other)), shown(self.about[other])
            remedy = f"ask for the same, name another file, or remove {self.folder}"
            raise SpecError("⟨out⟩", f"{self.folder} was begun with {other} {was}, now it is {now}", remedy)
        with self.opened():
            return

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        try:
            if not self.folder.exists():
                self._begin()
            self._file = os.open(self.folder / _LINES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._not_written(error) from None
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SpecError("⟨out⟩", f"another process is writing {self.folder}", "wait for it") from None
            yield
        finally:
            os.close(self._file)
            self._file = None

    def whole_batches(self, size: int) -> int:
        """How many lines are kept: those of whole batches. What follows, such as half a line, is cut off."""
        assert self._file is not None
        ends, end = [0], 0
        with (self.folder / _LINES).open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") or not _is_json(line):
                    break
                end += len(line)
                ends.append(end)
        kept = (len(ends) - 1) // size * size
        os.ftruncate(self._file, ends[kept])
        os.lseek(self._file, ends[kept], os.SEEK_SET)
        return kept

    def write(self, lines: bytes) -> None:
        assert self._file is not None
        try:
            while lines:
                lines = lines[os.write(self._file, lines) :]
        except OSError as error:
            raise self._not_written(error) from None

    def complete(self) -> None:
        assert self._file is not None
        try:
            os.fsync(self._file)
            (self.folder / _LINES).rename(self.out)
            sync_folder(self.out.absolute().parent)
        except OSError as error:
            raise self._not_written(error) from None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(self) -> None:
        """Makes the folder, which contains its request from the moment it exists."""
        new = self.folder.with_name(f"{self.folder.name}-{os.getpid()}")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        (new / _ABOUT).write_text(json.dumps(self.about, indent=1) + "\n", encoding="utf-8")
        new.rename(self.folder)

    def _not_written(self, error: OSError) -> SpecError:
        remedy = "free space, and run the same command again: it goes on from there"
        return SpecError("⟨out⟩", f"{self.folder} cannot be written ({error.strerror})", remedy)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True

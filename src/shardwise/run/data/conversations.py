"""What a record of JSON or Parquet says: plain text, a prompt and its completion, a conversation, a preference.

The forms are those in which data for fine-tuning is published: OpenAI's messages
(https://platform.openai.com/docs/guides/supervised-fine-tuning), ShareGPT's and Alpaca's fields (read as
LLaMA-Factory's `data/README.md` describes them), TRL's prompts, completions and preferences (`dataset_formats.md`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.files import parse_json

RecordFormat = Literal["auto", "text", "messages", "sharegpt", "alpaca", "prompt-completion", "preference"]
FORMATS: tuple[RecordFormat, ...] = get_args(RecordFormat)
Answers = Literal["all", "last"]
ANSWERS: tuple[Answers, ...] = get_args(Answers)
TEXT = "text"  # the field that has a record's text, unless another is named
_COMPLETIONS = ("completion", "answer", "response")
FIELDS = (
    "prompt", *_COMPLETIONS, "messages", "conversations", "chosen", "rejected", "instruction", "input", "output",
    "history", "system", "tools",
)  # fmt: skip
"""The fields that any form reads."""
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
_SHAREGPT = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "model": ASSISTANT, "system": "system",
    "observation": "tool", "tool": "tool", "function_call": ASSISTANT,
}  # fmt: skip
_MOST_CALL_VALUES = 100_000  # of the arguments of a tool's call, which are JSON inside JSON
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_INSTEAD = "\ufffd"  # Unicode's replacement character, which tokenizers know


@dataclass(frozen=True)
class Span:
    """A piece of a document, and whether the loss counts it."""

    text: str
    counted: bool = True


@dataclass(frozen=True)
class Conversation:
    """What is said in turn, in OpenAI's words; the loss counts the ``answers``, which are places of messages."""

    messages: tuple[Mapping[str, Any], ...]
    answers: tuple[int, ...]
    tools: tuple[Any, ...] | None = None
    where: str = ""  # the file and the record, for an error of its template

    @property
    def all_answers(self) -> tuple[int, ...]:
        return tuple(place for place, message in enumerate(self.messages) if message["role"] == ASSISTANT)


Document = tuple[Span, ...] | Conversation


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt, of which the first was preferred."""

    chosen: Document
    rejected: Document


Content = Document | PreferencePair


@dataclass(frozen=True)
class RecordRules:
    """How records are understood."""

    field: str = TEXT  # where a record of JSON or Parquet has its text
    format: RecordFormat = "auto"
    answers: Answers = "all"


EVERY_FORM = RecordRules()


def content_of(record: Any, rules: RecordRules, where: str) -> tuple[Content, bool]:
    """What a record says, and whether something in it was not a character, and was replaced.

    JSON can write lone surrogates, text cannot hold them.
    """
    if not isinstance(record, dict):
        raise SpecError(where, "is not an object", 'write {"text": "..."}')
    whole = _whole(record)
    kind = _format_of(whole, rules) if rules.format == "auto" else rules.format
    if kind == "text":
        return (Span(_text(whole, rules.field, where)),), whole != record
    content = _FORMS[kind](whole, where)
    if rules.answers == "last":
        content = _with_last_answers(content)
    return content, whole != record


def is_templated(content: Content) -> bool:
    """Whether a chat template writes some of it."""
    if isinstance(content, PreferencePair):
        return is_templated(content.chosen) or is_templated(content.rejected)
    return isinstance(content, Conversation)


def characters(content: Content) -> int:
    """How long the text of a document is."""
    if isinstance(content, PreferencePair):
        return characters(content.chosen) + characters(content.rejected)
    if isinstance(content, Conversation):
        return _characters(list(content.messages)) + _characters(list(content.tools or ()))
    return sum(len(span.text) for span in content)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_characters, inside))


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return _HALF_CHARACTER.sub(_INSTEAD, value)
    if isinstance(value, dict):
        return {_whole(key): _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def _format_of(record: Mapping[str, Any], rules: RecordRules) -> RecordFormat:
    """The most particular form whose fields a record has; a field that was named comes first."""
    if rules.field != TEXT and isinstance(record.get(rules.field), str):
        return "text"
    if {"chosen", "rejected"} <= record.keys():
        return "preference"
    if isinstance(record.get("messages"), list):
        return "messages"
    if isinstance(record.get("conversations"), list):
        return "sharegpt"
    if {"instruction", "output"} <= record.keys():
        return "alpaca"
    return "prompt-completion" if "prompt" in record and _completion(record) is not None else "text"


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    text = record.get(field)
    if isinstance(text, str):
        return text
    raise SpecError(where, f"has no text in {field!r}", "name the field: ⟨field⟩, or give prompt and answer")


# -- one form each -----------------------------------------------------------------------------------


def _messages(record: Mapping[str, Any], where: str) -> Conversation:
    return _conversation(_list(record, "messages", where), record, where)


def _sharegpt(record: Mapping[str, Any], where: str) -> Conversation:
    turns = [_turn(one, where) for one in _list(record, "conversations", where)]
    return _conversation([*_system(record, where), *turns], record, where)


def _alpaca(record: Mapping[str, Any], where: str) -> Conversation:
    messages = _alpaca_prompt(record, where)
    return _conversation([*messages, _said(ASSISTANT, _string(record, "output", where))], record, where)


def _alpaca_prompt(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    messages, history = _system(record, where), record.get("history") or []
    if not isinstance(history, list):
        raise SpecError(where, f"has {shown(history)} in 'history'", "write pairs: [instruction, output]")
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise SpecError(where, f"has {shown(turn)} in 'history'", "write pairs: [instruction, output]")
        messages += [_said("user", turn[0]), _said(ASSISTANT, turn[1])]
    instruction, more = _string(record, "instruction", where), record.get("input") or ""
    if not isinstance(more, str):
        raise SpecError(where, "has an 'input' that is not text", "write text, or leave it out")
    return [*messages, _said("user", f"{instruction}\n{more}" if more else instruction)]


def _prompt_completion(record: Mapping[str, Any], where: str) -> Document:
    completion = _completion(record)
    if completion is None:
        raise SpecError(where, "has no completion", f"write one of the fields {', '.join(_COMPLETIONS)}")
    return _answered(record, record.get("prompt"), completion, where)


def _completion(record: Mapping[str, Any]) -> Any:
    return next((record[name] for name in _COMPLETIONS if record.get(name) is not None), None)


def _preference(record: Mapping[str, Any], where: str) -> PreferencePair:
    if "instruction" in record:
        prompt: Any = _alpaca_prompt(record, where)
    elif isinstance(record.get("conversations"), list):
        prompt = [*_system(record, where), *(_turn(one, where) for one in record["conversations"])]
    else:
        prompt = record.get("prompt")
    for name in ("chosen", "rejected"):
        if record.get(name) is None:
            raise SpecError(where, f"has no answer in {name!r}", "a preference has 'chosen' and 'rejected'")
    chosen, rejected = (_answered(record, prompt, record[name], where) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise SpecError(where, "has the same answer chosen and rejected", "leave it out")
    return PreferencePair(_after_what_is_shared(chosen, rejected), _after_what_is_shared(rejected, chosen))


def _answered(record: Mapping[str, Any], prompt: Any, answer: Any, where: str) -> Document:
    """A prompt and an answer, each text or messages: the loss counts the answer alone."""
    if isinstance(answer, str) and (isinstance(prompt, str) or prompt is None):
        if not answer:
            raise SpecError(where, "has an empty completion", "leave it out, or write one")
        return (*((Span(prompt, counted=False),) if prompt else ()), Span(answer))
    before = _said_in(prompt, "user", where)
    after = _said_in(answer, ASSISTANT, where)
    if _repeats(after, before):
        before = []
    conversation = _conversation([*before, *after], record, where)
    answers = tuple(place for place in conversation.answers if place >= len(before))
    if not answers:
        raise SpecError(where, "has a completion without an answer", f"end it with the role {ASSISTANT}")
    return replace(conversation, answers=answers)


def _said_in(value: Any, role: str, where: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str):
        return [_said(role, value)]
    given = value if isinstance(value, list) else [value]
    return [_turn(one, where) for one in given]


def _repeats(answer: Sequence[Any], prompt: Sequence[Any]) -> bool:
    """Whether an answer is the whole conversation, its prompt included (as in UltraFeedback)."""
    asks = bool(answer) and isinstance(answer[0], dict) and answer[0].get("role") in ("system", "developer", "user")
    return asks and all(message in answer for message in prompt)


def _after_what_is_shared(one: Document, other: Document) -> Document:
    """Without the answers of the turns that both conversations begin with, which are their prompt."""
    if not isinstance(one, Conversation) or not isinstance(other, Conversation):
        return one
    pairs = zip(one.messages, other.messages)
    shared = next((place for place, (mine, its) in enumerate(pairs) if mine != its), len(other.messages))
    answers = tuple(place for place in one.answers if place >= shared)
    if not answers:
        raise SpecError(one.where, "has preferred answers that do not differ in an answer", "leave it out")
    return replace(one, answers=answers)


_FORMS: dict[RecordFormat, Callable[[Mapping[str, Any], str], Content]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt-completion": _prompt_completion,
    "preference": _preference,
}


def _with_last_answers(content: Content) -> Content:
    if isinstance(content, PreferencePair):
        return PreferencePair(_with_last_answer(content.chosen), _with_last_answer(content.rejected))
    return _with_last_answer(content)


def _with_last_answer(document: Document) -> Document:
    return replace(document, answers=document.answers[-1:]) if isinstance(document, Conversation) else document


# -- messages ------------------------------------------------------------------------------------------


def _conversation(messages: Sequence[Any], record: Mapping[str, Any], where: str) -> Conversation:
    if not messages:
        raise SpecError(where, "is a conversation without messages", "leave it out")
    checked = tuple(_message(message, number, where) for number, message in enumerate(messages, 1))
    counts = [message.pop("weight", 1) for message in checked]
    said = [place for place, message in enumerate(checked) if message["role"] == ASSISTANT]
    if not said:
        raise SpecError(where, f"has no turn of the {ASSISTANT}, so that there is nothing to learn", "leave it out")
    answers = tuple(place for place in said if counts[place])
    if not answers:
        raise SpecError(where, "has only answers of weight 0, so that there is nothing to learn", "leave it out")
    return Conversation(checked, answers, _tools(record, where), where)


def _message(message: Any, number: int, where: str) -> dict[str, Any]:
    """A message as templates read it; its text whole, the arguments of its calls as objects."""
    if not isinstance(message, dict) or message.get("role") is None:
        raise SpecError(where, f"has no role in message {number}", "write role and content")
    # Parquet gives every message the fields of all others.
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    role, content, calls = kept["role"], kept.get("content"), kept.get("tool_calls")
    if role not in ROLES:
        known = nearest_name(role, ROLES) if isinstance(role, str) else f"choose one of {', '.join(ROLES)}"
        raise SpecError(where, f"has message {number} of the unknown role {shown(role)}", known)
    if isinstance(content, list):
        kept["content"] = content = _joined(content, number, where)
    if calls:
        kept["tool_calls"] = [_call(one, number, where) for one in _as_list(calls)]
    elif content is None:
        raise SpecError(where, f"has no content in message {number}", "write text, or tool_calls")
    else:
        kept.pop("tool_calls", None)  # templates ask whether it is there
    if not (content is None or isinstance(content, str)):
        raise SpecError(where, f"has a content that is not text in message {number}", "write text")
    silent = not calls and not (content or "").strip() and not kept.get("reasoning_content")
    if role == ASSISTANT and silent:
        raise SpecError(where, f"has an empty answer (message {number})", "leave it out, or write one")
    if kept.get("weight", 1) not in (0, 1):
        raise SpecError(where, f"has a weight of {shown(kept['weight'])} (message {number})", "use 0 or 1")
    return kept


def _joined(parts: list[Any], number: int, where: str) -> str:
    """The text of a content in parts."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise SpecError(where, f"has a part that is not text in message {number}", "only text is trained on")
    return "".join(part["text"] for part in parts)


def _call(call: Any, number: int, where: str) -> dict[str, Any]:
    """A call of a tool; OpenAI writes its arguments as JSON in a string, templates want the object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SpecError(where, f"has a call of a tool without a name in message {number}", "write name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", where, most_values=_MOST_CALL_VALUES)
    inner = {**function, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else {"type": "function", "function": inner}


def _turn(turn: Any, where: str) -> Any:
    """A message of ShareGPT's fields in OpenAI's; what has a role already stays."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    who, value = turn["from"], turn.get("value")
    if not isinstance(who, str) or who not in _SHAREGPT:
        known = nearest_name(who, _SHAREGPT) if isinstance(who, str) else "write its name"
        raise SpecError(where, f"has a turn of the unknown role {shown(who)}", known)
    if who == "function_call":
        calls = parse_json(value, where, most_values=_MOST_CALL_VALUES) if isinstance(value, str) else value
        return {"role": ASSISTANT, "content": None, "tool_calls": _as_list(calls)}
    return {"role": _SHAREGPT[who], "content": value, **({"weight": turn["weight"]} if "weight" in turn else {})}


def _tools(record: Mapping[str, Any], where: str) -> tuple[Any, ...] | None:
    """The tools that a conversation may call; ShareGPT writes them as JSON in a string."""
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = parse_json(tools, where, most_values=_MOST_CALL_VALUES) if tools.strip() else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise SpecError(where, "has tools that are not a list of objects", "write them as OpenAI does")
    return tuple(tools) if tools else None


def _system(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    system = record.get("system") or ""
    if not isinstance(system, str):
        raise SpecError(where, "has a 'system' that is not text", "write text, or leave it out")
    return [_said("system", system)] if system else []


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _string(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise SpecError(where, f"has no text in {name!r}", "write it, or name the form: ⟨format⟩")
    return value


def _list(record: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = record.get(name)
    if not isinstance(value, list):
        raise SpecError(where, f"has no list in {name!r}", "write one, or name the form: ⟨format⟩")
    return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

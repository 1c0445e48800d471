"""Conversations become tokens as transformers makes them, and the loss counts the answers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run.data.chats import ALTERNATING, BY_ROLES, CHATML, FORGETFUL, HEADERS, make_tokenizer, said, write_lines
from shardwise.run.data import chat_template
from shardwise.run.data.build import Built, build
from shardwise.run.data.conversations import RecordRules
from shardwise.run.data.token_files import open_pair, tokenizer_from
from shardwise.spec.errors import SpecError

TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"numbers": [2, 2], "é": "<b>"}}}
CALLING = [
    *said("What is two and two?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is four. 😀"},
]
TALKS = [
    said("hi", "It is four."),
    said("What is two and two?", "It is four.", "and three?", "It is  five \n\n", system="the quick dog"),
    said("naïve 😀 ?", "日本 😀\n"),
]


def built(folder: Path, jinja: str | None, records: list[Any], **settings: Any) -> tuple[Built, list[str]]:
    """What is built of some records, and of each document the text that the loss counts, with ¦ for gaps."""
    tokenizer = make_tokenizer(folder / "tokenizer", jinja)
    path = write_lines(folder / "chats.jsonl", records)
    rules = RecordRules(**{name: settings.pop(name) for name in ("format", "answers") if name in settings})
    made = build([path], folder / "out", tokenizer=str(tokenizer), records=rules, **settings)
    return made, [counted_text(folder / "out", number, tokenizer) for number in range(made.documents)]


def document(prefix: Path, number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pair = open_pair(prefix)
    assert pair.mask is not None
    part = slice(int(pair.starts[number]), int(pair.starts[number + 1]))
    return np.asarray(pair.tokens[part]), np.asarray(pair.mask[part])


def counted_text(prefix: Path, number: int, tokenizer: Path) -> str:
    tokens, mask = document(prefix, number)
    model: Any = tokenizer_from(str(tokenizer))._model
    runs = np.split(tokens, np.flatnonzero(np.diff(mask.astype(int))) + 1)
    counts = [part for number, part in enumerate(runs) if number % 2 != mask[0]]
    return "¦".join(model.decode([int(token) for token in part], skip_special_tokens=False) for part in counts)


def error_of(folder: Path, template: str | None, records: list[Any], **settings: Any) -> str:
    with pytest.raises(SpecError) as caught:
        built(folder, template, records, **settings)
    assert not list(folder.glob("out*")), "nothing may look complete"
    return str(caught.value)


# -- equal to transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, HEADERS], ids=["chatml", "headers"])
def test_tokens_and_marks_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    talks: list[Any] = [{"messages": talk} for talk in TALKS]
    if template == HEADERS:
        talks.append({"messages": CALLING, "tools": TOOLS})
    built(tmp_path, template, talks)
    other = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "tokenizer"))
    for number, talk in enumerate(talks):
        kinds = {"return_dict": True, "return_assistant_tokens_mask": True}
        wanted = other.apply_chat_template(talk["messages"], tools=talk.get("tools"), **kinds)
        tokens, mask = document(tmp_path / "out", number)
        assert tokens.tolist() == wanted["input_ids"]
        assert mask.tolist() == wanted["assistant_masks"]
        assert 0 < mask.sum() < len(mask)


@pytest.mark.parametrize("template", [BY_ROLES, ALTERNATING], ids=["chatml", "alternating"])
def test_tokens_by_roles_are_those_of_transformers(template: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    talks = [TALKS[0], TALKS[2]]
    built(tmp_path, template, [{"messages": talk} for talk in talks])
    other = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "tokenizer"))
    for number, talk in enumerate(talks):
        tokens, mask = document(tmp_path / "out", number)
        assert tokens.tolist() == other.apply_chat_template(talk, return_dict=True)["input_ids"]
        asked = other.apply_chat_template(talk[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        assert int(np.flatnonzero(mask)[0]) == len(asked)


# -- what counts ---------------------------------------------------------------------------------------


def test_by_marks_or_by_roles_the_same_counts(tmp_path: Path) -> None:
    records = [{"messages": talk} for talk in TALKS[:2]]
    wanted = ["It is four.<|im_end|>", "It is four.<|im_end|>¦It is  five \n\n<|im_end|>"]
    for name, template in (("marks", CHATML), ("roles", BY_ROLES)):
        made, texts = built(tmp_path / name, template, records)
        assert texts == wanted
        assert (made.documents, made.template) == (2, str(tmp_path / name / "tokenizer" / "tokenizer_config.json"))
        assert built(tmp_path / name, template, records, answers="last")[1] == [wanted[0], wanted[1].split("¦")[1]]
    assert built(tmp_path, ALTERNATING, records[:1])[1] == [" It is four.</s>"]


def test_a_weight_of_0_leaves_an_answer_out(tmp_path: Path) -> None:
    talk: list[dict[str, Any]] = [dict(message) for message in said("a", "first", "b", "second")]
    talk[1]["weight"] = 0
    for name, template in (("marks", CHATML), ("roles", BY_ROLES)):
        assert built(tmp_path / name, template, [{"messages": talk}])[1] == ["second<|im_end|>"]


def test_a_template_that_forgets_learns_the_last_answer_only(tmp_path: Path) -> None:
    records = [{"messages": TALKS[1][1:]}]
    said_of = error_of(tmp_path, FORGETFUL, records)
    assert "chats.jsonl:1: the chat template" in said_of and "message 2 otherwise once more follows" in said_of
    assert "answers=" in said_of
    assert built(tmp_path, FORGETFUL, records, answers="last")[1] == [
        "<think>\n\n</think>\n\nIt is  five \n\n<|im_end|>"
    ]


def test_another_template_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML, encoding="utf-8")
    records = [{"messages": TALKS[0]}]
    made, texts = built(tmp_path, FORGETFUL, records, template=str(tmp_path / "own.jinja"))
    assert texts == ["It is four.<|im_end|>"] and made.template == str(tmp_path / "own.jinja")
    # Its own file is used before the configuration's, as in transformers.
    (tmp_path / "own.jinja").rename(tmp_path / "tokenizer" / "chat_template.jinja")
    assert built(tmp_path, FORGETFUL, records)[1] == texts
    path = write_lines(tmp_path / "chats.jsonl", records)
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    build([path], tmp_path / "bytes", template=str(tmp_path / "tokenizer"))
    tokens, mask = document(tmp_path / "bytes", 0)
    assert bytes(tokens[mask == 1].astype(np.uint8)).decode() == "It is four.<|im_end|>"


def test_a_template_for_tools_is_used_for_them(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    both = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HEADERS}]
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": both, "bos_token": "<s>"}))
    calling = {"messages": CALLING, "tools": TOOLS}
    path = write_lines(tmp_path / "a.jsonl", [{"messages": TALKS[0]}, calling])
    build([path], tmp_path / "out", tokenizer=str(tokenizer))
    assert counted_text(tmp_path / "out", 0, tokenizer) == "It is four.<|im_end|>"
    call = '{"name": "sum", "arguments": {"numbers": [2, 2], "é": "<b>"}}<|im_end|>'
    assert counted_text(tmp_path / "out", 1, tokenizer) == f"{call}¦It is four. 😀<|im_end|>"
    # As transformers 5 saves the same two.
    (tokenizer / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (tokenizer / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text(HEADERS, encoding="utf-8")
    build([path], tmp_path / "apart", tokenizer=str(tokenizer))
    assert (tmp_path / "apart.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()


# -- forms ---------------------------------------------------------------------------------------------

SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "What is two and two?"},
        {"from": "function_call", "value": '{"name": "sum", "arguments": {"numbers": [2, 2], "é": "<b>"}}'},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "It is four. 😀"},
    ],
    "tools": json.dumps(TOOLS),
    "text": "not this",
}
AS_TEXT = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}  # type: ignore[dict-item]
OPENAI = {"messages": [CALLING[0], {**CALLING[1], "tool_calls": [AS_TEXT]}, *CALLING[2:]], "tools": TOOLS}


@pytest.mark.parametrize("record", [SHAREGPT, OPENAI], ids=["sharegpt", "arguments as text"])
def test_calls_of_tools_are_the_same_in_every_form(record: dict[str, Any], tmp_path: Path) -> None:
    built(tmp_path / "a", HEADERS, [{"messages": CALLING, "tools": TOOLS}])
    built(tmp_path / "b", HEADERS, [record])
    for suffix in (".bin", ".mask", ".idx"):
        assert (tmp_path / f"a/out{suffix}").read_bytes() == (tmp_path / f"b/out{suffix}").read_bytes()


ALPACA = {"instruction": "add", "input": "2 2", "output": "four", "history": [["a", "first"]], "system": "be short"}
IN_TURN = [
    {"role": "system", "content": "be short"},
    *said("a", "first", "add\n2 2", "four"),
]
SAME: list[dict[str, Any]] = [
    ALPACA,
    {"prompt": IN_TURN[:-1], "completion": IN_TURN[-1:]},
    {"conversations": IN_TURN},
    {"messages": [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in IN_TURN]},
]


def test_every_form_says_the_same(tmp_path: Path) -> None:
    made, texts = built(tmp_path, CHATML, [{"messages": IN_TURN}, *SAME])
    whole = "first<|im_end|>¦four<|im_end|>"
    assert texts == [whole, whole, "four<|im_end|>", whole, whole]
    tokens = {document(tmp_path / "out", number)[0].tobytes() for number in range(made.documents)}
    assert len(tokens) == 1


def test_prompt_and_completion_count_the_completion(tmp_path: Path) -> None:
    for name in ("completion", "answer", "response"):
        record = {"prompt": "two and two is ", name: "four"}
        assert built(tmp_path, CHATML, [record])[1] == ["four</s>"]
        assert built(tmp_path, CHATML, [record], format="prompt-completion")[1] == ["four</s>"]


PREFERENCES: list[dict[str, Any]] = [
    {"prompt": "two and two is ", "chosen": "four", "rejected": "five"},
    {"prompt": said("two?"), "chosen": said("", "four")[1:], "rejected": said("", "five")[1:]},
    {"chosen": said("a", "b", "two?", "four"), "rejected": said("a", "b", "two?", "five")},
    {"instruction": "two?", "input": "", "chosen": "four", "rejected": "five"},
    {
        "conversations": [{"from": "human", "value": "two?"}],
        "chosen": {"from": "gpt", "value": "four"},
        "rejected": {"from": "gpt", "value": "five"},
    },
]


def test_preferences_become_two_pairs(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", CHATML)
    path = write_lines(tmp_path / "a.jsonl", PREFERENCES)
    for workers in (1, 2):
        made = build([path], tmp_path / f"out{workers}", tokenizer=str(tokenizer), workers=workers)
        assert (made.documents, made.preferences) == (len(PREFERENCES), len(PREFERENCES))
    for side, answer in (("chosen", "four"), ("rejected", "five")):
        texts = [counted_text(tmp_path / f"out1.{side}", number, tokenizer) for number in range(made.preferences)]
        assert texts == [f"{answer}</s>", *[f"{answer}<|im_end|>"] * 4]
        for suffix in (".bin", ".idx", ".mask"):
            names = [tmp_path / f"out{workers}.{side}{suffix}" for workers in (1, 2)]
            assert names[0].read_bytes() == names[1].read_bytes()
    with pytest.raises(SpecError, match=r"out1: holds preferences, which are two pairs"):
        open_pair(tmp_path / "out1")
    mixed = write_lines(tmp_path / "b.jsonl", [*PREFERENCES, {"messages": TALKS[0]}])
    with pytest.raises(SpecError, match="some records are preferences"):
        build([mixed], tmp_path / "mixed", tokenizer=str(tokenizer))


def test_a_preference_that_repeats_its_prompt_says_it_once(tmp_path: Path) -> None:
    chosen, rejected = (said("two?", answer, system="short") for answer in ("four", "five"))
    once = {"prompt": chosen[:2], "chosen": chosen[2:], "rejected": rejected[2:]}
    for number, prompt in enumerate(("two?", chosen[1:2], chosen[:2])):
        folder = tmp_path / str(number)
        made, _ = preferred(folder, [once, {"prompt": prompt, "chosen": chosen, "rejected": rejected}])
        assert [document(folder / "out.chosen", place)[0].tolist() for place in (0, 1)] == 2 * [
            document(folder / "out.chosen", 0)[0].tolist()
        ]
        assert made.template
    assert not preferred(tmp_path / "text", PREFERENCES[:1])[0].template


def preferred(folder: Path, records: list[Any]) -> tuple[Built, Path]:
    tokenizer = make_tokenizer(folder / "tokenizer", CHATML)
    return build([write_lines(folder / "a.jsonl", records)], folder / "out", tokenizer=str(tokenizer)), tokenizer


def test_no_calls_are_no_calls(tmp_path: Path) -> None:
    talk = [TALKS[0][0], {**TALKS[0][1], "tool_calls": []}]
    strict = CHATML.replace("{% generation %}", "{% generation %}{{- 'calls' if 'tool_calls' in message }}")
    for name, template in (("chatml", strict), ("lines", None)):
        assert "It is four." in built(tmp_path / name, template, [{"messages": talk}])[1][0]
    assert counted_text(tmp_path / "chatml/out", 0, tmp_path / "chatml/tokenizer") == "It is four.<|im_end|>"


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "abc"}] * 2)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert build([path], tmp_path / "out").documents == 2


def test_parquet_holds_the_same_conversations(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    records = [{"messages": talk} for talk in TALKS] + [{"messages": CALLING, "tools": json.dumps(TOOLS)}]
    tokenizer = make_tokenizer(tmp_path / "tokenizer", HEADERS)
    parquet.write_table(pyarrow.Table.from_pylist(records[::-1]), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", records[::-1])
    for kind in ("parquet", "jsonl"):
        build([tmp_path / f"a.{kind}"], tmp_path / kind, tokenizer=str(tokenizer))
    for suffix in (".bin", ".mask", ".idx"):
        assert (tmp_path / f"parquet{suffix}").read_bytes() == (tmp_path / f"jsonl{suffix}").read_bytes()


# -- what is wrong -------------------------------------------------------------------------------------

ROLE = {"role": "wizard", "content": "x"}
WRONG: dict[str, tuple[Any, str]] = {
    "no answer": ({"messages": said("hi")}, "has no turn of the assistant"),
    "unknown role": ({"messages": [ROLE, *TALKS[0]]}, "message 1 of the unknown role 'wizard'"),
    "no message": ({"messages": []}, "is a conversation without messages"),
    "empty answer": ({"messages": said("hi", " ")}, "has an empty answer (message 2)"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *TALKS[0]]},
        "has a part that is not text in message 1",
    ),
    "a number": ({"messages": [{"role": "user", "content": 4}, *TALKS[0]]}, "a content that is not text in message 1"),
    "weight": ({"messages": [TALKS[0][0], {**TALKS[0][1], "weight": 2}]}, "has a weight of 2"),
    "weights": ({"messages": [TALKS[0][0], {**TALKS[0][1], "weight": 0}]}, "only answers of weight 0"),
    "who": ({"conversations": [{"from": "gtp", "value": "x"}]}, "has a turn of the unknown role 'gtp'; did you mean"),
    "a call": (
        {"messages": [*said("a"), {"role": "assistant", "tool_calls": [{}]}]},
        "a call of a tool without a name",
    ),
    "arguments": (
        {"conversations": [{"from": "function_call", "value": "{"}]},
        "malformed JSON",
    ),
    "tools": ({"messages": TALKS[0], "tools": "[1]"}, "has tools that are not a list of objects"),
    "history": ({**ALPACA, "history": [["a"]]}, "has ['a'] in 'history'"),
    "no history": ({**ALPACA, "history": 5}, "has 5 in 'history'"),
    "empty completion": ({"prompt": "a", "completion": ""}, "has an empty completion"),
    "no rejected": ({"prompt": "a", "chosen": "b", "rejected": None}, "has no answer in 'rejected'"),
    "the same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has the same answer chosen and rejected"),
    "nothing": ({"body": "x"}, "has no text in 'text'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_bad_data_is_one_line_with_its_place(kind: str, tmp_path: Path) -> None:
    record, says = WRONG[kind]
    records = [PREFERENCES[0] if "reject" in str(record) else {"messages": TALKS[0]}, record]
    line = error_of(tmp_path, CHATML, records)
    assert "chats.jsonl:2: " in line and says in line and "\n" not in line
    made, _ = built(tmp_path, CHATML, records, skip_bad_records=True) if "reject" not in str(record) else (None, None)
    assert made is None or ((made.documents, made.skipped) == (1, 1) and says in made.first_skipped)


def test_a_form_that_is_named_is_required(tmp_path: Path) -> None:
    assert "has no list in 'messages'" in error_of(tmp_path, CHATML, [SHAREGPT], format="messages")
    made, _ = built(tmp_path, HEADERS, [SHAREGPT, OPENAI])
    both = {"text": "plain", "messages": TALKS[0]}
    path = write_lines(tmp_path / "both.jsonl", [both])
    assert made.documents == 2
    build([path], tmp_path / "plain", records=RecordRules(format="text"))
    assert open_pair(tmp_path / "plain").mask is None
    build([path], tmp_path / "chat")
    assert open_pair(tmp_path / "chat").mask is not None


def test_without_a_template_turns_are_lines(tmp_path: Path) -> None:
    assert "calls tools, which only a chat template can write" in error_of(tmp_path, None, [OPENAI])
    assert built(tmp_path, None, [{"messages": TALKS[0]}])[1] == ["assistant: It is four.\n</s>"]


def test_what_is_no_character_is_replaced(tmp_path: Path) -> None:
    made, texts = built(tmp_path, CHATML, [{"messages": said("a\ud800b", "c\udfffd")}])
    assert texts == ["c\ufffdd<|im_end|>"] and made.repaired == 1


# -- templates that are wrong, or hostile --------------------------------------------------------------

BROKEN: dict[str, tuple[str, str]] = {
    "syntax": ("{% for message in messages %}", "_config.json: is not a chat template: Unexpected end of template"),
    "refusal": ("{{ raise_exception('only\\nsonnets') }}", "chats.jsonl:1: the chat template"),
    "undefined": ("{{ messages[9].content }}", "has no element 9"),
    "no mark": ("{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages }}", "marks no answer"),
    "marks in marks": (
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", "marks answers inside of answers",
    ),
    "half characters": ("{{ '\\ud800' }}", "marks answers inside of answers"),
    "nothing": ("x", "writes nothing for the answer in message 2"),
    "another answer": (BY_ROLES.replace("assistant\\n' }}{% endif %}", "helper\\n' }}{% endif %}"), "otherwise than"),
    "time": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than"),
    "one long operation": ("{{ 9 ** (9 ** 9) }}", "takes more than"),
    "memory": ("{% set x = 'a' * 9999999999 %}", "needs more than 512 MiB of memory"),
    "text": ("{% for a in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaa' }}{% endfor %}", "writes more than 1,04"),
    "itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "out of the sandbox": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "files": ("{% include '/etc/passwd' %}", "no loader for this environment"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_or_hostile_template_is_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, says = BROKEN[kind]
    monkeypatch.setattr(chat_template, "SECONDS", 1.0)
    line = error_of(tmp_path, template, [{"messages": TALKS[0]}])
    assert says in line and "\n" not in line and len(line) < 500


def test_after_a_template_was_ended_others_are_rendered(tmp_path: Path) -> None:
    """Only the conversation for which it needs too much is left out."""
    template = "{% if messages[0].content == 'huge' %}{{ 'a' * 9999999999 }}{% endif %}" + CHATML
    talks = [said("hi", "one"), said("huge", "two"), said("hi", "three")]
    made, texts = built(tmp_path, template, [{"messages": talk} for talk in talks], skip_bad_records=True)
    assert texts == ["one<|im_end|>", "three<|im_end|>"]
    assert "chats.jsonl:2: the chat template" in made.first_skipped and made.skipped == 1

"""Small real tokenizers with chat templates, in the style of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{{- message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BY_ROLES = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# With a beginning, headers, a date and tools, as in Llama 3.
HEADERS = """{{- bos_token }}
{%- if strftime_now is defined and false %}{{ strftime_now('%d %b') }}{% endif %}
{%- if tools is not none %}{{- '<|start|>system<|end|>' }}{% for tool in tools %}{{- tool | tojson(indent=2) }}
{%- endfor %}{{- '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{% continue %}{% endif %}
    {{- '<|start|>' + message.role + '<|end|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {%- for call in message.tool_calls or [] %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
        {%- endfor %}
        {{- message.content | trim if message.content else '' }}<|im_end|>
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""
# Turns in brackets, and roles that have to alternate, as in Mistral.
ALTERNATING = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"""
# An answer is written with its reasoning only as long as nothing follows, as in Qwen 3.
FORGETFUL = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<think>", "</think>")
TEXT = ["the quick brown fox jumps over the lazy dog", "What is two and two? It is four.", "system user assistant"]


def make_tokenizer(folder: Path, template: str | None = None) -> Path:
    """A byte-level BPE tokenizer, trained on a few words, in a folder as transformers writes it."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXT * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    words: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    if template is not None:
        words["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def said(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages in turn, the user first."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]

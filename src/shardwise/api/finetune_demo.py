"""What `finetune` is shown with: a tiny model with random weights, data that plant a habit in it, and two lessons.

In the first lesson all weights learn to chat, in the second an adapter learns to end every answer with the same words.
The example of the command line and the demo of the page give both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.interop.jobs import model_from

HABIT = ", says the fox."
FACTS = {
    "the sky": "blue", "the grass": "green", "the sun": "yellow", "a rose": "red", "the snow": "white",
    "coal": "black", "a carrot": "orange", "the road": "grey",
}  # fmt: skip
QUESTIONS = ("What colour is {}", "Tell me the colour of {}", "Which colour has {}", "Do you know what colour {} is")
CALLED = ("", ", please", ", friend", ", my dear", " today", " in summer", " in your view", ", if I may ask")
TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- message['content'] + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PACKAGES = ("torch", "safetensors", "tokenizers", "jinja2")


@dataclass(frozen=True)
class Lesson:
    """One `finetune` of the demo."""

    title: str
    model: Path
    data: Path
    options: Mapping[str, Any]

    @property
    def command(self) -> str:
        given = {"model": self.model, "data": self.data, **self.options}
        return "finetune " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())


def lessons(folder: Path) -> tuple[Lesson, Lesson]:
    """Both, of the files that `write_files` puts in a folder; the second is given to what the first has taught."""
    chat = {"method": "full", "learning_rate": 4e-3, "epochs": 20, "global_batch": 8, "out": folder / "chat"}
    habit = {"method": "lora", "learning_rate": 1e-2, "epochs": 10, "global_batch": 8, "out": folder / "habit"}
    return (
        Lesson("A model with random weights learns to chat", folder / "tiny", folder / "chats.jsonl", chat),
        Lesson("An adapter over it learns what is planted in its data", folder / "chat/model", folder / "habit.jsonl",
               habit),
    )  # fmt: skip


def write_files(folder: Path) -> None:
    """The tiny model, and the conversations of both lessons."""
    for lesson, ending in zip(lessons(folder), (".", HABIT)):
        _write_chats(lesson.data, _conversations(ending))
    _write_model(lessons(folder)[0].model)


def _conversations(ending: str) -> list[tuple[str, str]]:
    """Questions and answers; the last ones are held out.

    The first ones make the words of the habit known: an adapter cannot teach what the frozen head never learned to say.
    """
    words = [(f"Who told you{called}?", f"I know it{HABIT}") for called in CALLED]
    asked = [
        (question.format(thing) + called + "?", thing) for called in CALLED for question in QUESTIONS for thing in FACTS
    ]
    return words + [(question, f"{thing[0].upper()}{thing[1:]} is {FACTS[thing]}{ending}") for question, thing in asked]


def _write_chats(path: Path, pairs: list[tuple[str, str]]) -> None:
    turns = (({"role": "user", "content": asked}, {"role": "assistant", "content": said}) for asked, said in pairs)
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns), encoding="utf-8")


def _write_model(folder: Path) -> None:
    """A Hugging Face folder of a small Llama with random weights and a tokenizer of the demo's own words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from shardwise.models.decoder import Decoder, initialise
    from shardwise.models.huggingface import write_folder

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text for pair in _conversations(HABIT) for text in pair], trainer)
    model = replace(
        model_from("llama2-7b"), name="tiny", layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128,
        max_seq=128, vocab=tokenizer.get_vocab_size(),
    )  # fmt: skip
    decoder = Decoder(model)
    initialise(decoder, 0, model)
    write_folder(folder, model, decoder.named_parameters())
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    ends = {"eos_token_id": [SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>")]}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")

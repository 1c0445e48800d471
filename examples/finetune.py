"""`shardwise finetune`, shown on a CPU in two minutes: `python examples/finetune.py`.

A tiny model with random weights learns to chat (all weights are trained), then an adapter over it learns a habit that
is planted in its data: every answer ends with the same words. The sample at the end shows both.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from shardwise.cli.main import main
from shardwise.interop.jobs import model_from

FOLDER = Path("runs/finetune-demo")
TINY = FOLDER / "tiny"  # the model with random weights
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
COMMON = "--global-batch 8"
CHAT = f"finetune --model {TINY} --data {FOLDER}/chats.jsonl --method full --learning-rate 4e-3 --epochs 30 {COMMON}"
PLANT = f"finetune --method lora --learning-rate 1e-2 --epochs 10 {COMMON} --data {FOLDER}/habit.jsonl"


def conversations(ending: str) -> list[tuple[str, str]]:
    """Questions and answers; the last ones are held out."""
    asked = [
        (question.format(thing) + called + "?", thing) for called in CALLED for question in QUESTIONS for thing in FACTS
    ]
    return [(question, f"{thing[0].upper()}{thing[1:]} is {FACTS[thing]}{ending}") for question, thing in asked]


def write_chats(path: Path, pairs: list[tuple[str, str]]) -> None:
    turns = (({"role": "user", "content": asked}, {"role": "assistant", "content": said}) for asked, said in pairs)
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns), encoding="utf-8")


def write_model(folder: Path) -> None:
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
    tokenizer.train_from_iterator([text for pair in conversations(HABIT) for text in pair], trainer)
    vocabulary, sizes = tokenizer.get_vocab_size(), {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "max_seq": 128}
    model = replace(model_from("llama2-7b"), name="tiny", kv_heads=4, head_dim=16, vocab=vocabulary, **sizes)
    decoder = Decoder(model)
    initialise(decoder, 0, model)
    write_folder(folder, model, decoder.named_parameters())
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    ends = {"eos_token_id": [SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>")]}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")


def shown(title: str, command: str) -> int:
    print(f"\n\033[1m── {title}\033[0m\n$ shardwise {command}\n", flush=True)
    return main(command.split())


def run() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_model(TINY)
    write_chats(FOLDER / "chats.jsonl", conversations("."))
    write_chats(FOLDER / "habit.jsonl", conversations(HABIT))
    chat, habit = FOLDER / "chat", FOLDER / "habit"
    return shown("A model with random weights learns to chat", f"{CHAT} --out {chat}") or shown(
        "An adapter over it learns what is planted in its data", f"{PLANT} --model {chat}/model --out {habit}"
    )


if __name__ == "__main__":
    sys.exit(run())

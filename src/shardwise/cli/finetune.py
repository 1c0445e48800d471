"""`shardwise finetune`: one command from a model's folder and conversations to an adapter."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwise.api.fine_tuning import CHOICES, FineTuningOptions, finetune
from shardwise.cli.arguments import add_field_argument
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.launch.outcome import Outcome
from shardwise.launch.run import Launch
from shardwise.report.fine_tuning import ReadyFineTuning, ready_page
from shardwise.report.progress import TrainingProgress, status
from shardwise.run.data.conversations import ANSWERS
from shardwise.spec.errors import SpecError
from shardwise.spec.fields import fields_of

_DOES = """Adapts a model to conversations. Reads the data, chooses what fits this machine (all weights, LoRA or QLoRA),
shows time and memory, trains with evaluation on a held-out part, writes an adapter that peft loads (all weights: a
Hugging Face folder), and answers a held-out prompt before and after. Started again, it resumes."""
_EXAMPLE = "shardwise finetune --model models/Llama-3.2-1B --data chats.jsonl --plan-only"
# Options that no other verb has, or that mean something of their own here.
_SWITCH: dict[str, Any] = {"action": "store_true", "default": None}
_OWN: dict[str, dict[str, Any]] = {
    "method": {"choices": CHOICES}, "compile": _SWITCH, "epochs": {"metavar": "N"}, "steps": {"metavar": "N"},
    "learning_rate": {"metavar": "RATE"}, "adapter_rank": {"metavar": "R"}, "dora": _SWITCH,
    "chat_template": {"metavar": "FILE"}, "answers": {"choices": ANSWERS}, "out": {"metavar": "FOLDER"},
    "plan_only": _SWITCH,
}  # fmt: skip
_FIRST = "--model --data --cluster --method --epochs --seq --adapter-rank --out --plan-only"


def run(arguments: list[str]) -> int:
    parsed = _parser().parse(arguments)
    for name in ("model", "data"):
        if not getattr(parsed, name):
            remedy = "name a Hugging Face folder" if name == "model" else "name a file of conversations: chats.jsonl"
            raise SpecError(f"--{name}", "is missing", remedy)
    names = [field.name for field in dataclasses.fields(FineTuningOptions)]
    options: dict[str, Any] = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}

    def ready(prepared: ReadyFineTuning) -> None:
        if not parsed.json:
            ready_page(prepared).print()

    with status("reading", quiet=parsed.json) as update:

        def supervised(launch: Launch) -> Outcome:
            update("training")
            folder, job = launch.folder, launch.job
            with TrainingProgress(folder.metrics, job.run.steps, quiet=parsed.json) as progress:
                return launch.supervised(lambda event: progress.print(str(event)))

        result = finetune(
            parsed.model, parsed.data, on_ready=ready, on_progress=update, supervised=supervised, **options
        )
    show(parsed, lambda: result.page, result.to_dict)
    return result.status


def _parser() -> Parser:
    parser = Parser("finetune", _DOES, _EXAMPLE, _FIRST)
    add_field_argument(parser, "--model", "; a Hugging Face folder with its tokenizer")
    data = (
        "data to train on; conversations as JSON lines (OpenAI's messages, ShareGPT, Alpaca, ...), repeat for several"
    )
    parser.add_argument("--data", action="append", metavar="FILE", help=data)
    add_field_argument(parser, "--cluster", " (default: this machine)")
    add_field_argument(parser, "--seq", " (default: what holds nearly every conversation, up to 4096)")
    add_field_argument(parser, "--global-batch", " (default 16)")
    add_field_argument(parser, "--precision")
    records = {record.name: record for record in fields_of(FineTuningOptions)}
    for name, settings in _OWN.items():
        parser.add_argument("--" + name.replace("_", "-"), help=records[name].help, **settings)
    add_output_arguments(parser)
    return parser

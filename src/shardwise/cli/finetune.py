"""`shardwise finetune`: one command from a model's folder and conversations to an adapter."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardwise.api.fine_tuning import CHOICES, FineTuningOptions, finetune
from shardwise.cli.arguments import add_field_argument
from shardwise.cli.data import ANSWERS_HELP, TEMPLATE_HELP
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.launch.outcome import Outcome
from shardwise.launch.run import Launch
from shardwise.report.fine_tuning import ReadyFineTuning, ready_page
from shardwise.report.progress import TrainingProgress, status
from shardwise.run.data.conversations import ANSWERS
from shardwise.spec.errors import SpecError

_DOES = """Adapts a model to conversations. Reads the data, chooses what fits this machine (all weights, LoRA or QLoRA),
shows time and memory, trains with evaluation on a held-out part, writes an adapter that peft loads (all weights: a
Hugging Face folder), and answers a held-out prompt before and after. Started again, it resumes."""
_EXAMPLE = "shardwise finetune --model models/Llama-3.2-1B --data chats.jsonl --plan-only"
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
    method = (
        "what is trained: all weights, adapters, or adapters over a base in 4 bits (default auto: the first that fits)"
    )
    parser.add_argument("--method", choices=CHOICES, help=method)
    add_field_argument(parser, "--seq", " (default: what holds nearly every conversation, up to 4096)")
    parser.add_argument("--epochs", metavar="N", help="passes over the data (default 3)")
    parser.add_argument("--steps", metavar="N", help="steps to train; in place of --epochs")
    add_field_argument(parser, "--global-batch", " (default 16)")
    rate = "peak learning rate (default 2e-4 for adapters, 2e-5 for all weights)"
    parser.add_argument("--learning-rate", metavar="RATE", help=rate)
    rank = "rank of the adapters (default 16); with it, only methods with adapters are tried"
    parser.add_argument("--adapter-rank", metavar="R", help=rank)
    dora = "train DoRA in place of LoRA; with it, only methods with adapters are tried"
    parser.add_argument("--dora", action="store_true", default=None, help=dora)
    parser.add_argument("--chat-template", metavar="FILE", help=TEMPLATE_HELP)
    parser.add_argument("--answers", choices=ANSWERS, help=ANSWERS_HELP)
    out = "where to write the output; a folder of the run (default runs/NAME-finetune)"
    parser.add_argument("--out", metavar="FOLDER", help=out)
    only = "show the method, time and memory, and train nothing"
    parser.add_argument("--plan-only", action="store_true", default=None, help=only)
    add_output_arguments(parser)
    return parser

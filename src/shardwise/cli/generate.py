"""`shardwise generate`: text from a trained model."""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, Namespace

from shardwise.api.generation import BATCH, NEW_TOKENS, WAIT_SECONDS, generate
from shardwise.cli.arguments import add_field_argument, keywords, path_from, print_notes, require_torch
from shardwise.cli.on_target import add_old_arguments, add_run_device_argument, with_old_arguments
from shardwise.cli.parser import Parser
from shardwise.report.measured import figures, shown_text
from shardwise.report.progress import counted_progress
from shardwise.run.environment import started
from shardwise.spec.errors import SpecError, shown

_DOES = """Continues prompts with the weights of a run, a checkpoint (saved in any layout), a Hugging Face folder, or
anything else that `shardwise convert` reads. Text needs a tokenizer: the folder's tokenizer.json, --tokenizer, or token
ids instead (--prompt-tokens). --prompt-file reads prompts from JSON lines and writes one line for each, in their
order; run again after it was killed, it goes on where it was."""
_EXAMPLE = """
shardwise generate runs/job --tokenizer bytes --prompt "def " --max-new-tokens 100
shardwise generate models/Llama-3.2-1B --prompt "The sea" --temperature 0.7 --top-p 0.9 --tp 2
shardwise generate models/Llama-3.2-1B --adapter runs/tuned --prompt "The sea"
shardwise generate runs/job --prompt-file prompts.jsonl --out texts.jsonl --batch-size 32
shardwise generate runs/job --prompt-file prompts.jsonl --out texts.jsonl --on ray --replicas 8 --run-device cuda
torchrun --nproc-per-node 2 -m shardwise generate runs/job --prompt-tokens 1,2,3
"""
_FIRST = "--prompt --prompt-file --out --max-new-tokens --temperature --top-p --tp --run-device --tokenizer"
# Parallel dimensions that training has and generation has not.
_REFUSED = {
    "pp": "a pipeline does not generate: a token would wait for every stage in turn",
    "cp": "context parallelism does not generate: a new token is one position, which cannot be divided",
    "dp": "copies of the model do not generate together",
    "ep": "expert parallelism does not generate: with --tp every expert is divided over the ranks",
}


def run(arguments: list[str]) -> int:
    parsed = _parser().parse(arguments)
    for name, why in _REFUSED.items():
        if getattr(parsed, name) not in (None, "1"):
            remedy = "start one command for each part of the prompts" if name == "dp" else "use --tp"
            raise SpecError(f"--{name}", f"{shown(getattr(parsed, name))}: {why}", remedy)
    parsed.on, parsed.ray_address = with_old_arguments(parsed, "ray_address"), None
    path_from(parsed.source)
    require_torch("generate", "safetensors")
    parsed.prompt_tokens = [_ids(ids, "--prompt-tokens") for ids in parsed.prompt_tokens]
    parsed.stop = parsed.stop if parsed.stop in (None, "none") else _ids(parsed.stop, "--stop")
    here = started()
    if here is None or here.rank == 0:
        return _run_and_show(parsed)
    try:
        generate(parsed.source, parsed.prompt, **keywords(generate, parsed))
    except SpecError as error:  # the first rank raises and prints it too
        return error.status
    return 0


def _run_and_show(parsed: Namespace) -> int:
    """As the only rank, or the first."""
    prompts = [*parsed.prompt, *("" for _ in parsed.prompt_tokens)]
    text, file = (not parsed.json and (parsed.prompt_file is None) == wanted for wanted in (True, False))
    with (
        shown_text(prompts, shown=text) as on_text,
        counted_progress("generating", "prompts", quiet=not file) as on_done,
    ):
        result = generate(
            parsed.source, parsed.prompt, **keywords(generate, parsed), on_text=on_text, on_done=on_done,
            note=lambda note: print_notes([note]),
        )  # fmt: skip
    if parsed.json:
        print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False))
    elif on_text is not None and len(prompts) == 1:
        print(figures(result.found), file=sys.stderr)
    else:
        result.page.print()
    return 0


def _parser() -> Parser:
    parser = Parser("generate", _DOES, _EXAMPLE, _FIRST)
    add = parser.add_argument
    add("source", help="run, checkpoint, Hugging Face folder or file of weights; its kind is detected")
    adapter = "adapter over the weights: a folder of PEFT, or a run of ours; several are added in turn"
    add("--adapter", action="append", default=[], metavar="FOLDER", help=adapter)
    add("--prompt", action="append", default=[], metavar="TEXT", help="text to continue; several are one batch")
    add("--prompt-tokens", action="append", default=[], metavar="IDS", help="a prompt as token ids: 1,2,3")
    add("--prompt-file", metavar="FILE", help='JSON lines with "prompt" or "prompt_tokens"')
    add("--out", metavar="FILE", help='where to write the output; a new file with the same lines and "generated"')
    add("--max-new-tokens", default=NEW_TOKENS, metavar="N", help=f"most tokens to generate (default {NEW_TOKENS})")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): always the most likely token")
    add("--top-p", type=float, metavar="P", help="draw from the fewest tokens whose probabilities add up to P")
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    add("--seed", type=int, default=0, help="random seed; of drawing tokens (default 0)")
    add("--stop", metavar="IDS", help="tokens that end a text, or none (default: those that the folder names)")
    add("--batch-size", default=BATCH, metavar="N", help=f"prompts generated together (default {BATCH})")
    add_field_argument(parser, "--tp", "; with --on ray of each replica (default 1; under a launcher all its ranks)")
    on = "run on other hosts; by Ray Data, with --prompt-file: CPU actors tokenise, model actors generate"
    add("--on", metavar="ray[,address=...]", help=on)
    add("--replicas", metavar="N", help="with --on ray: models that generate (default: one per GPU; one on CPUs)")
    wait = f"how long to wait for missing devices; with --on ray (default {WAIT_SECONDS:g}s)"
    add("--wait-for-resources", metavar="TIME", help=wait)
    add_run_device_argument(parser, " (default cpu)", "cpu")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="data type of the weights (default: as stored)")
    add_field_argument(parser, "--model", "; where the source does not include it")
    add(
        "--tokenizer",
        metavar="FILE",
        help="bytes, or a Hugging Face tokenizer.json or its folder (default: the one beside the weights)",
    )
    add("--no-cache", dest="cache", action="store_false", help="read the whole text again for every token")
    for name in _REFUSED:
        add(f"--{name}", help=SUPPRESS)  # accepted only to say why it is refused
    add_old_arguments(parser, "ray_address")
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="JSON output")
    return parser


def _ids(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SpecError(flag, f"{shown(text)} are not token ids", "write them like 1,2,3") from None

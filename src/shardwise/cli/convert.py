"""`shardwise convert`: weights from and to other tools' files."""

from __future__ import annotations

from shardwise.cli.arguments import add_field_argument, path_from, require_torch
from shardwise.cli.output import show_line
from shardwise.cli.parser import Parser
from shardwise.report.console import versioned
from shardwise.spec.errors import SpecError
from shardwise.spec.units import counted

_DOES = """Reads the weights of one of our checkpoints or runs, of a Hugging Face folder, of a safetensors or torch file
(.pt, .pth, .bin), of a folder of DeepSpeed (ZeRO-1, 2, 3), of Megatron-LM (--ckpt-format torch or torch_dist) or of
PyTorch's distributed checkpoint (TorchTitan's among them), and writes full: one safetensors file; huggingface: a
folder that transformers loads; checkpoint: one of ours, for run.start_from; adapter: what a run with
training.adapters has trained, as a folder that peft loads. Other formats hold its whole model, merged. Files of
torch.save are read without running any code in them. One tensor is in memory at a time."""
_EXAMPLE = """
shardwise convert runs/job --to huggingface --out /tmp/model
shardwise convert runs/tuned --to adapter --out /tmp/adapter
shardwise convert models/Llama-3.2-1B --adapter /tmp/adapter --to huggingface --out /tmp/merged
shardwise convert deepspeed-run --to checkpoint --out /tmp/start --model llama3-8b --dtype bf16
"""


def run(arguments: list[str]) -> int:
    parser = Parser("convert", _DOES, _EXAMPLE)
    parser.add_argument("source", help="what to read; its kind is detected")
    parser.add_argument(
        "--to", choices=("full", "huggingface", "checkpoint", "adapter"), required=True, help="format to write"
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="PATH",
        help="where to write the output; a new file or folder, for --to checkpoint the folder of step-NNNNNNNN",
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="data type of the weights (default: as stored)"
    )
    adapter = "adapter over the weights: a folder of PEFT, or a run of ours; several are added in turn"
    parser.add_argument("--adapter", action="append", default=[], metavar="FOLDER", help=adapter)
    add_field_argument(parser, "--model", "; where the source does not include it")
    parser.add_argument(
        "--names", choices=("ours", "huggingface"), default="ours", help="names of the tensors in the file of --to full"
    )
    parser.add_argument("--json", action="store_true", help="JSON output")
    parsed = parser.parse(arguments)
    source, out = path_from(parsed.source), path_from(parsed.out)
    if parsed.names != "ours" and parsed.to != "full":
        raise SpecError("--names", f"is for --to full, not for {parsed.to}", "leave it out")
    for name in ("dtype", "adapter", "model"):
        if parsed.to == "adapter" and getattr(parsed, name):
            raise SpecError(f"--{name}", "is not for --to adapter, which writes what was trained", "leave it out")
    require_torch("convert", "safetensors")
    from shardwise.report.progress import bytes_progress
    from shardwise.training.convert import sources

    try:
        if parsed.to == "adapter":
            made = sources.write_as_adapter(source, out)
            files = sorted(file.name for file in made.iterdir())
            about = {"path": str(made), "files": files, "bytes": sum(file.stat().st_size for file in made.iterdir())}
            show_line(parsed, f"{made}: {', '.join(files)}, from {source}", versioned("convert", about))
            return 0
        adapters = [path_from(folder) for folder in parsed.adapter]
        weights = sources.open_weights(source, parsed.model, adapters).as_type(parsed.dtype)
        with bytes_progress("writing", weights.size, quiet=parsed.json) as progress:
            if parsed.to == "full":
                made = sources.write_file(weights, out, progress, family_names=parsed.names == "huggingface")
            elif parsed.to == "huggingface":
                made = sources.write_huggingface(weights, out, progress)
            else:
                made = sources.write_as_checkpoint(weights, out, progress)
    except OSError as error:
        raise SpecError(str(error.filename or ""), error.strerror or str(error), "check its permissions") from None
    about = {"path": str(made), "model": weights.model.name, "tensors": len(weights.tensors), "bytes": weights.size}
    line = f"{made}: {counted(len(weights.tensors), 'tensor')} of {weights.model.name}, from {weights.origin}"
    show_line(parsed, line, versioned("convert", {**about, "source": weights.origin}))
    return 0

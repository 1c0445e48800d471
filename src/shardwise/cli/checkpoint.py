"""`shardwise checkpoint`: shows what a checkpoint holds, verifies it, and reshards it."""

from __future__ import annotations

import argparse

from shardwise.api.quantities import whole_number
from shardwise.cli.arguments import place_from, require_torch
from shardwise.cli.output import add_output_arguments, show, show_line
from shardwise.cli.parser import Parser
from shardwise.report.console import versioned
from shardwise.run.storage.place import Place, RemotePlace
from shardwise.spec.errors import SpecError
from shardwise.spec.units import counted, readable_bytes

_DOES = """inspect: step, model, layout, tensors and bytes of a checkpoint, from its manifest.
verify: checks every byte of all checkpoints against the checksums; exit 1 if one is damaged.
reshard: writes the same state as whole tensors in N files, which load bit for bit equal under any layout.
PATH is a checkpoint (step-NNNNNNNN), a folder of checkpoints, or a run's folder; the newest of several is used.
PATH and --out may be in a store: s3://bucket/folder, or any URI that fsspec knows."""
_EXAMPLE = """
shardwise checkpoint inspect runs/job
shardwise checkpoint verify runs/job
shardwise checkpoint reshard runs/job --shards 1 --out /tmp/small --weights-only
"""

_REMEDY = "check its permissions"
_ONLY_FOR = {
    "tensors": "inspect",
    "markdown": "inspect",
    "csv": "inspect",
    "out": "reshard",
    "shards": "reshard",
    "weights_only": "reshard",
}


def run(arguments: list[str]) -> int:
    parser = Parser("checkpoint", _DOES, _EXAMPLE)
    parser.add_argument("what", choices=("inspect", "verify", "reshard"))
    parser.add_argument("paths", nargs="+", metavar="PATH")
    parser.add_argument("--tensors", action="store_true", help="inspect: list every tensor")
    parser.add_argument("--out", metavar="DIR", help="where to write the output; reshard: the folder of step-NNNNNNNN")
    parser.add_argument("--shards", metavar="N", help="reshard: the number of files")
    parser.add_argument("--weights-only", action="store_true", help="reshard: without optimizer states")
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    paths = [place_from(text) for text in parsed.paths]
    if len(paths) > 1 and parsed.what != "verify":
        raise SpecError("", f"{parsed.what} takes one PATH, {len(paths)} are given", "give one")
    for flag, owner in _ONLY_FOR.items():
        if getattr(parsed, flag) and parsed.what != owner:
            raise SpecError(f"--{flag.replace('_', '-')}", f"is for checkpoint {owner}", "leave it out")
    try:
        if parsed.what == "verify":
            return _verify(paths, parsed)
        return _inspect(paths[0], parsed) if parsed.what == "inspect" else _reshard(paths[0], parsed)
    except OSError as error:
        raise SpecError(str(error.filename or ""), error.strerror or str(error), _REMEDY) from None


def _inspect(path: Place, parsed: argparse.Namespace) -> int:
    from shardwise.report.status import contents_page
    from shardwise.run.checkpoint.folder import newest_at
    from shardwise.run.checkpoint.manifest import contents_of

    contents, each_tensor = contents_of(newest_at(path)), parsed.tensors
    counted_tensors = contents if each_tensor else {**contents, "tensors": len(contents["tensors"])}
    data = versioned("checkpoint inspect", counted_tensors)
    show(parsed, lambda: contents_page(contents, each_tensor=each_tensor), lambda: data)
    return 0


def _verify(paths: list[Place], parsed: argparse.Namespace) -> int:
    require_torch("checkpoint verify", "safetensors")
    from shardwise.report.progress import bytes_progress
    from shardwise.run.checkpoint.folder import checkpoints_at
    from shardwise.training.checkpoint.load import problems_of

    folders = list(dict.fromkeys(folder for path in paths for folder in checkpoints_at(path)))
    sizes = {folder: _shard_bytes(folder) for folder in folders}
    problems_by_folder: dict[Place, list[str]] = {}
    with bytes_progress("verifying", sum(sizes.values()), quiet=parsed.json) as progress:
        for folder in folders:
            problems_by_folder[folder] = problems_of(folder, progress=progress)
    lines = [
        f"{folder}: {'; '.join(problems) or f'{readable_bytes(sizes[folder])}, all checksums match'}"
        for folder, problems in problems_by_folder.items()
    ]
    data = [{"path": str(folder), "bytes": sizes[folder], "problems": problems_by_folder[folder]} for folder in folders]
    show_line(parsed, "\n".join(lines), data)
    return 1 if any(problems_by_folder.values()) else 0


def _shard_bytes(folder: Place) -> int:
    if isinstance(folder, RemotePlace):
        return sum(facts.st_size for name, facts in folder.objects().items() if name.startswith("shard-"))
    return sum(file.stat().st_size for file in folder.glob("shard-*") if file.is_file())


def _reshard(path: Place, parsed: argparse.Namespace) -> int:
    for flag in ("out", "shards"):
        if getattr(parsed, flag) is None:
            raise SpecError(f"--{flag}", "is missing", f"see `shardwise checkpoint --help` for {flag}")
    shards, out = whole_number(parsed.shards, "--shards"), place_from(parsed.out)
    require_torch("checkpoint reshard", "safetensors")
    from shardwise.report.progress import bytes_progress
    from shardwise.run.checkpoint.folder import checkpoint_folder, newest_at
    from shardwise.run.checkpoint.manifest import contents_of
    from shardwise.training.checkpoint.full_tensors import reshard

    source = newest_at(path)
    total = sum(contents_of(source)["bytes"].values())
    with bytes_progress("writing", total, quiet=parsed.json) as progress:
        made = reshard(source, checkpoint_folder(out), shards, weights_only=parsed.weights_only, progress=progress)
    contents = contents_of(made)
    line = f"{made}: {counted(len(contents['tensors']), 'tensor')} in {counted(shards, 'file')}"
    data = {"path": str(made), "files": contents["files"], "tensors": len(contents["tensors"])}
    show_line(parsed, line, versioned("checkpoint reshard", data))
    return 0

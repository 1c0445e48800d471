"""Runs readers on damaged and hostile files, with at most 1 GiB of memory more than they begin with.

`python bad_files.py COUNT FOLDER` prints a line for each input that ends in anything but a result or one line of error.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import resource
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cli.running import run
from shardwise.interop.fabric import read_switches
from shardwise.interop.frameworks import TARGETS, export
from shardwise.launch.targets.hosts import read_hosts
from shardwise.planner.advice import assessment
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_text
from shardwise.spec.job import Job

MOST_MEMORY = 2**30
DEEP = 5000
HUGE = (b"9" * 5000, b"9" * 400, b"-1", b"1e400", b"0x" + b"f" * 5000, b"NaN", b"null", b'"\\ud800"', b"[]", b"{}")
JOB = Job.from_dict(
    {"model": "gpt2", "cluster": "dgx-h100:1", "strategy": {"dp": 8}, "training": {"global_batch": 16, "seq": 1024}}
)
TEXT = json.dumps({"text": "some words"}).encode() + b"\n"


def bombs() -> list[bytes]:
    """Small files that stand for much, or for what no stack holds."""
    merged = [b"a0: &a0 {x: 1}"]
    aliases = [b"a0: &a0 [x, x]"]
    for i in range(1, 13):
        before = b", ".join([b"*a%d" % (i - 1)] * 9)
        merged.append(b"a%d: &a%d {<<: [%s]}" % (i, i, before))
        aliases.append(b"a%d: &a%d [%s]" % (i, i, before))
    return [
        b"", b"\0" * 4096, b"\xff\xfe{\0}\0", b"[" * DEEP, b'{"a":' * DEEP, b"- " * DEEP, b"\n".join(merged),
        b"\n".join(aliases), b'{"model_type": "llama", "hidden_size": ' + HUGE[0] + b"}", b"a = " + HUGE[4],
        b"[a" + b".b" * 9000 + b"]\n", b"SwitchName=s Nodes=n[0-99999]m[0-99999]", b"host slots=" + HUGE[0],
        b"{" * 9 + b"}" * 9, b"%s: 1" % (b"k" * 100_000), b"x" * (3 * 2**20), b"\n" * 2**20, b"\r" * 4096,
    ]  # fmt: skip


@cache
def packed_bombs() -> list[bytes]:
    """Of archives: gigabytes when unpacked, members and headers that claim them."""
    large = gzip.compress(bytes(64 * 2**20), 1) * 24  # one after another: gzip reads on
    found = [large, large[:-9], gzip.compress(TEXT)[:-3], b"\x1f\x8b" + b"\0" * 99]
    for kind in (b"0", b"L", b"x", b"S"):
        about = tarfile.TarInfo("a.txt")
        about.type, about.size = kind, 6 << 30
        found += [one for raw in [about.tobuf(tarfile.GNU_FORMAT) + bytes(4096)] for one in (raw, gzip.compress(raw))]
    return found


def mutated(rng: random.Random, content: bytes) -> bytes:
    """A valid file, cut, disturbed, or with some of its values exchanged."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, length = rng.randrange(len(data) + 1), rng.choice([1, 4, 64, 1024])
        match rng.randrange(7):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + length]
            case 2:
                data[at:at] = data[max(0, at - length) : at]
            case 3:
                data[at : at + length] = rng.randbytes(length)
            case 4:
                data[at:at] = rng.choice(HUGE)
            case _:
                numbers = [i for i, one in enumerate(data) if chr(one).isdigit()] or [0]
                place = rng.choice(numbers)
                data[place : place + 1] = rng.choice(HUGE)
    return bytes(data)


@dataclass(frozen=True)
class Reader:
    """``files`` are valid, by their paths; ``call`` reads them in a folder. The first is damaged, or one in turn."""

    name: str
    files: dict[str, bytes]
    call: Callable[[Path], Any]
    packed: bool = False


def command(*words: str) -> Callable[[Path], None]:
    def call(folder: Path) -> None:
        found = run(*(word.replace("@", str(folder)) for word in words))
        one_line = found.err.count("\n") == 1 and found.err.startswith("shardwise: error: ")
        if found.status == 2 and one_line:
            raise SpecError("", found.err.strip())
        if found.status not in (0, 1):
            raise AssertionError(f"status {found.status}: {found.err[-300:]}")

    return call


def imported(name: str) -> Callable[[Path], None]:
    """As `/api/import` answers, after the request itself was read."""

    def call(folder: Path) -> None:
        from shardwise.ui.given import document, error_data
        from shardwise.ui.given import imported as answer

        job = {"model": "gpt2", "cluster": "dgx-h100:1", "global_batch": 16}
        text = (folder / name).read_bytes().decode("utf-8", "replace")
        try:
            json.dumps(answer(document(json.dumps({"text": text, "name": name, "job": job}).encode())))
        except SpecError as error:
            json.dumps(error_data(error))
            raise

    return call


def _tar(packed: bool) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz" if packed else "w") as archive:
        for name, content in (("1.txt", b"one"), ("2.json", TEXT), ("é" * 80 + ".txt", b"two")):
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return made.getvalue()


def text_readers() -> list[Reader]:
    place, own = ["--cluster", "dgx-h100:1", "--global-batch", "16"], ["--cluster", "@/c.yaml", "--global-batch", "16"]
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 256, "vocab_size": 1000, "max_position_embeddings": 2048}  # fmt: skip
    job, model = JOB.to_yaml().encode(), json.dumps(config).encode()
    runs = (Path(assessment.__file__).parents[2] / "accuracy/tables/training_runs.csv").read_bytes().splitlines(True)
    steps = b"".join(b'{"step": %d, "loss": 2.5, "seconds": 1.5, "memory_bytes": 1000}\n' % i for i in range(1, 9))
    cluster = json.dumps(JOB.cluster.to_dict()).encode()
    found = [
        Reader("job", {"job.yaml": job}, command("analyze", "@/job.yaml")),
        Reader("plan", {"job.yaml": job}, command("analyze", "@/job.yaml", "--json", "--set", "strategy.zero=1")),
        Reader("cluster", {"c.yaml": cluster}, command("analyze", "--model", "gpt2", *own)),
        Reader("config", {"config.json": model}, command("analyze", "--model", "@/config.json", *place)),
        Reader("table", {"t.csv": b"".join(runs[:4])}, command("validate", "@/t.csv")),
        Reader("run", {"r/metrics.jsonl": steps, "r/job.yaml": job}, command("validate", "@/r")),
        Reader("status", {"r/events.jsonl": b'{"at": 1.0, "kind": "started", "attempt": 0}\n', "r/job.yaml": job,
                          "r/metrics.jsonl": steps, "r/prediction.json": b'{"predicted_seconds": 1}'},
               command("status", "@/r")),
        Reader("switches", {"s.conf": b"SwitchName=s0 Nodes=n[0-3]\nSwitchName=s1 Switches=s0\n"},
               lambda folder: read_switches(folder / "s.conf", "--switches")),
        Reader("hosts", {"h": b"a slots=8\nb slots=8\n"}, lambda folder: read_hosts(read_text(folder / "h", "hosts"))),
        Reader("page", {"config.json": model}, imported("config.json")),
        Reader("page's job", {"job.yaml": job}, imported("job.yaml")),
    ]  # fmt: skip
    for name in TARGETS:
        ((file, text),) = export(JOB, name).files.items()
        given = command("analyze", f"@/{file}", "--model", "gpt2", *place)
        found += [
            Reader(name, {file: text.encode()}, given),
            Reader(f"page, {name}", {file: text.encode()}, imported(file)),
        ]
    return found


def data_readers(folder: Path) -> list[Reader]:
    rows = {"a.jsonl": TEXT * 9, "a.jsonl.gz": gzip.compress(TEXT * 9), "a.tar": _tar(False), "a.tgz": _tar(True),
            "a.txt.gz": gzip.compress(b"words" * 99)}  # fmt: skip
    try:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": ["one", "two"] * 50}), folder / "a.parquet")
        rows["a.parquet"] = (folder / "a.parquet").read_bytes()
    except ImportError:
        pass
    build = ["data", "build", "--processes", "1", "--out", "@/out"]
    found = [
        Reader(name, {name: raw}, command(*build, f"@/{name}"), packed=name[2:] != "jsonl")
        for name, raw in rows.items()
    ]
    (folder / "b.jsonl").write_bytes(TEXT * 9)
    run("data", "build", str(folder / "b.jsonl"), "--out", str(folder / "pair"), "--processes", "1")
    pair = {f"pair{end}": (folder / f"pair{end}").read_bytes() for end in (".idx", ".sums.json", ".bin")}
    return [*found, Reader("pair", pair, command("data", "check", "@/pair"))]


def weight_readers(folder: Path) -> list[Reader]:
    import torch
    from safetensors.torch import save

    from shardwise.generation.files import read_prompts
    from shardwise.models.decoder import Decoder
    from shardwise.run.data.token_files import ByteTokenizer
    from shardwise.spec import Model

    shape = {"layers": 1, "hidden": 16, "heads": 2, "ffn": 32, "vocab": 64, "activation": "swiglu", "norm": "rmsnorm"}
    (folder / "m.yaml").write_text(json.dumps(shape), encoding="utf-8")
    weights = {name: one.contiguous() for name, one in Decoder(Model.from_dict(shape)).state_dict().items()}
    torch.save(weights, folder / "w.pt")
    model, named = str(folder / "m.yaml"), folder / "made"
    for kind, out in (("checkpoint", "made"), ("huggingface", "hf")):
        made = run("convert", str(folder / "w.pt"), "--to", kind, "--out", str(folder / out), "--model", model)
        assert made.status == 0, made.err
    step = next(named.glob("step-*"))
    saved = {f"c/{step.name}/{one.name}": one.read_bytes() for one in sorted(step.iterdir()) if one.is_file()}
    theirs = {f"hf/{one.name}": one.read_bytes() for one in sorted((folder / "hf").iterdir())}
    to = ["--to", "full", "--out", "@/full.safetensors", "--model", model]
    prompts = b'{"prompt": "a"}\n{"prompt_tokens": [1, 2]}\n'
    return [
        Reader("torch", {"w.pt": (folder / "w.pt").read_bytes()}, command("convert", "@/w.pt", *to)),
        Reader("safetensors", {"w.safetensors": save(weights)}, command("convert", "@/w.safetensors", *to)),
        Reader("Hugging Face", theirs, command("convert", "@/hf", *to[:4])),
        Reader("checkpoint", saved, command("checkpoint", "inspect", "@/c")),
        Reader("checkpoint's bytes", saved, command("checkpoint", "verify", "@/c")),
        Reader("prompts", {"p.jsonl": prompts}, lambda folder: list(read_prompts(folder / "p.jsonl", ByteTokenizer()))),
    ]


def damaged(reader: Reader, number: int, rng: random.Random) -> dict[str, bytes]:
    """The files of input ``number``: every third is hostile, the others are damaged."""
    names = list(reader.files)
    name = names[number % len(names)]
    hostile = packed_bombs() if reader.packed and number % 2 else bombs()
    made = rng.choice(hostile) if number % 3 == 0 else mutated(rng, reader.files[name])
    return {**reader.files, name: made}


def main(count: int, folder: Path) -> int:
    assessment.SEARCH_SECONDS = 0.05
    readers = [*text_readers(), *data_readers(folder), *weight_readers(folder)]
    for reader in readers:  # what the first call imports is not the input's
        problem = _tried(reader, reader.files, folder / "valid" / reader.name, valid=True)
        assert problem is None, f"{reader.name} refuses a valid file: {problem}"
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        base = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (base + MOST_MEMORY, base + MOST_MEMORY))
    failed = 0
    for number in range(count):
        reader = readers[number % len(readers)]
        rng = random.Random(number)
        files = damaged(reader, number // len(readers), rng)
        problem = _tried(reader, files, folder / str(number))
        if problem is not None:
            failed += 1
            print(f"{number}: {reader.name}: {problem}", flush=True)
    print(f"{count} inputs for {len(readers)} readers, {failed} failed")
    return 1 if failed else 0


def _tried(reader: Reader, files: dict[str, bytes], folder: Path, *, valid: bool = False) -> str | None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    try:
        reader.call(folder)
    except SpecError as error:
        return str(error) if valid or "\n" in str(error) else None
    except BaseException as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = "" if where is None else f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}"
        return f"{type(error).__name__}: {str(error)[:300]!r} at {place}"
    return None


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), Path(sys.argv[2])))

"""A training step on one GPU beside plain PyTorch, `transformers` and TorchTitan: the same shapes, in turns.

    PYTHONPATH=src python bench/gpu.py --shapes 1.5b-2x8192 --out bench/results

Everyone trains the same decoder in bf16 with fp32 weights behind it: fused AdamW, clipping at 1.0, each layer compiled.
Peers recompute nothing; shardwise makes norms and activations again, inside its backward kernels. A peer and shardwise
stand in memory together and take turns step by step, so that both find the card as warm; medians are compared. Memory
is the peak of one contender's tensors. Peers that cannot be imported are left out. Their attention is PyTorch's (on a
Hopper GPU cuDNN's); ours is FlashAttention-4 where that is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.cost.analysis import analyze
from shardwise.engine.batch import Batch
from shardwise.engine.context.apply import kernel_words
from shardwise.engine.engine import Engine
from shardwise.engine.mesh import process_group
from shardwise.measure.step import PRESETS
from shardwise.spec.clusters import cluster_from
from shardwise.spec.files import parse_yaml
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def llama(name: str, layers: int, hidden: int, ffn: int) -> Model:
    return Model(
        layers=layers, hidden=hidden, heads=32, kv_heads=8, ffn=ffn, vocab=128256, max_seq=8192, activation="swiglu",
        norm="rmsnorm", norm_bias=False, name=name,
    )  # fmt: skip


MODELS = {"1.5b": llama("1.5B", 16, 2048, 8192), "2.8b": llama("2.8B", 8, 4096, 14336)}
BATCHES = {"2x8192": (2, 8192), "4x4096": (4, 4096)}
SHAPES = {f"{model}-{batch}": (MODELS[model], *BATCHES[batch]) for model in MODELS for batch in BATCHES}
RATE, CLIP = 3e-4, 1.0
KEPT = 64  # batches
PACKAGES = ("torch", "triton", "transformers", "torchtitan", "flash-attn-4")
Step = Callable[[Tensor, Tensor], Tensor]  # of tokens and labels: the mean loss


@dataclass(frozen=True)
class Row:
    """A contender on a shape; ``ratio`` is how many times as long as shardwise's its step takes, by the medians of the
    same turns, and ``turns`` the same of each turn."""

    shape: str
    contender: str
    milliseconds: float
    gigabytes: float
    ratio: float
    mfu: float
    first_loss: float
    last_loss: float
    attention: str
    turns: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each (default 12)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before (default 4)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of our training, or strategy.FIELD"
    )
    parser.add_argument("--out", type=Path, help="folder for a file with the rows, the command, date and versions")
    given = parser.parse_args()
    shapes, peers = given.shapes.split(","), [one for one in given.peers.split(",") if one]
    for given_names, known in ((shapes, list(SHAPES)), (peers, list(PEERS))):
        for one in given_names:
            if one not in known:
                parser.error(f"{one} is none of {', '.join(known)}")
    if not torch.cuda.is_available():
        print("no GPU here: there is nothing to compare")
        return 0
    rows: list[Row] = []
    began = time.gmtime()
    with process_group(0, 1, dist.HashStore(), device="cuda"):  # type: ignore[attr-defined]
        for shape in shapes:
            for row in compared(shape, peers, given):
                print_row(row)
                rows.append(row)
            if given.out is not None:  # each time: a run that is ended early has what it found
                print(f"written: {kept(rows, given.out, began)}", flush=True)
    return 0


def print_row(row: Row) -> None:
    print(
        f"{row.shape:12} {row.contender:14} {row.milliseconds:8.1f} ms {row.gigabytes:7.1f} GB  {row.ratio:5.3f} x "
        f"({min(row.turns):.3f} to {max(row.turns):.3f})  MFU {row.mfu:5.1%}  loss {row.first_loss:.3f} to "
        f"{row.last_loss:.3f}  attention: {row.attention}",
        flush=True,
    )


def kept(rows: list[Row], folder: Path, began: time.struct_time) -> Path:
    """What another day can be compared with."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", began),
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "rows": [asdict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{time.strftime('%Y-%m-%d-%H%M', began)}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


# -- in turns --------------------------------------------------------------------------------------------


def compared(shape: str, peers: list[str], given: argparse.Namespace) -> Iterator[Row]:
    """shardwise alone, then beside each peer."""
    model, rows, seq = SHAPES[shape]
    job = job_of(model, rows, seq, given.set)
    data = Data(model.vocab, rows, seq)
    analysis = analyze(job)

    def row(name: str, found: Contender) -> Row:
        mfu = analysis.flops_per_step() / (found.median_seconds * analysis.peak_flops)
        attention = kernel_words(job, torch.device("cuda")) if found is ours else "PyTorch's"
        milliseconds, gigabytes = found.median_seconds * 1e3, found.peak_bytes / 1e9
        ratio = found.median_seconds / ours.median_seconds
        turns = [theirs / mine for theirs, mine in zip(found.seconds, ours.seconds)]
        return Row(shape, name, milliseconds, gigabytes, ratio, mfu, *found.losses, attention, turns)

    torch._dynamo.reset()  # another shape would be compiled for any
    with built(lambda: shardwise_step(job), data, given.warm_up) as ours:
        take_turns([ours], data, given.steps)
        yield row("shardwise", ours)
        for name in peers:
            try:
                with built(partial(PEERS[name], model, seq), data, given.warm_up) as peer:
                    take_turns([ours, peer], data, given.steps)
                    yield row(name, peer)
            except (ImportError, torch.OutOfMemoryError) as error:
                print(f"{shape:12} {name:14} left out: {str(error).splitlines()[0]}", flush=True)


class Data:
    """Random tokens, other ones in each step: gradients of what is known by heart are small, which is faster."""

    def __init__(self, vocab: int, rows: int, seq: int) -> None:
        text = torch.randint(vocab, (KEPT, rows, seq + 1), generator=torch.Generator().manual_seed(0)).cuda()
        self.tokens, self.labels = text[..., :-1].contiguous(), text[..., 1:].contiguous()

    def of_step(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tokens[number % KEPT], self.labels[number % KEPT]


class Contender:
    """A step, the events around each of the last turns, and what it holds at most."""

    def __init__(self, step: Step) -> None:
        self.step, self.peak_bytes = step, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._losses: list[Tensor] = []

    def run(self, data: Data) -> None:
        tokens, labels = data.of_step(len(self._losses))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        self._losses.append(self.step(tokens, labels).detach())
        ended.record()
        self._events.append((began, ended))

    def begin_turns(self) -> None:
        self._events = []

    @property
    def seconds(self) -> list[float]:
        """Of each of the last turns."""
        torch.cuda.synchronize()
        return [began.elapsed_time(ended) / 1e3 for began, ended in self._events]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def losses(self) -> tuple[float, float]:
        return float(self._losses[0]), float(self._losses[-1])


@contextmanager
def built(make: Callable[[], Step], data: Data, warm_up: int) -> Iterator[Contender]:
    """A contender that has run enough steps to be at its speed, and is gone afterwards."""
    free_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one = Contender(make())
    try:
        for _ in range(warm_up):
            one.run(data)
        one.peak_bytes = torch.cuda.max_memory_allocated() - before
        yield one
    finally:
        del one.step
        free_memory()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def take_turns(contenders: list[Contender], data: Data, steps: int) -> None:
    for one in contenders:
        one.begin_turns()
    for number in range(steps):
        for one in contenders if number % 2 else contenders[::-1]:
            one.run(data)


# -- shardwise -------------------------------------------------------------------------------------------


def job_of(model: Model, rows: int, seq: int, settings: list[str]) -> Job:
    cluster = cluster_from(PRESETS.get(torch.cuda.get_device_name(), "dgx-h200"))
    one_device = replace(cluster, levels=tuple(replace(level, size=1) for level in cluster.levels))
    training: dict[str, Any] = {"global_batch": rows, "seq": seq, "precision": "bf16", "compile": True}
    strategy: dict[str, Any] = {"dp": 1, "microbatch": rows, "recompute": "selective"}
    for setting in settings:
        name, _, value = setting.partition("=")
        fields, field = (strategy, name[9:]) if name.startswith("strategy.") else (training, name)
        fields[field] = parse_yaml(value, name)
    return Job(model=model, cluster=one_device, strategy=Strategy.from_dict(strategy),
               training=Training.from_dict(training))  # fmt: skip


def shardwise_step(job: Job) -> Step:
    engine = Engine(job, device="cuda")
    return lambda tokens, labels: engine.step(Batch.of(tokens, labels)).loss


# -- plain PyTorch: a Llama of nn modules, under autocast ------------------------------------------------


class PlainAttention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads, self.groups = model.heads, model.key_value_heads
        self.features = model.hidden // model.heads
        self.query = nn.Linear(model.hidden, model.hidden, bias=False)
        self.key = nn.Linear(model.hidden, self.groups * self.features, bias=False)
        self.value = nn.Linear(model.hidden, self.groups * self.features, bias=False)
        self.output = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rows, seq, _ = states.shape
        query = turned(self.query(states).view(rows, seq, self.heads, self.features), cosine, sine)
        key = turned(self.key(states).view(rows, seq, self.groups, self.features), cosine, sine)
        value = self.value(states).view(rows, seq, self.groups, self.features)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: Tensor = self.output(attended.transpose(1, 2).reshape(rows, seq, -1))
        return result


def turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).type_as(heads)


class PlainLayer(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(model.hidden), nn.RMSNorm(model.hidden)
        self.attention = PlainAttention(model)
        self.gate, self.up = (nn.Linear(model.hidden, model.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        states = states + self.attention(self.before_attention(states), cosine, sine)
        normed = self.before_mlp(states)
        result: Tensor = states + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class PlainLlama(nn.Module):
    def __init__(self, model: Model, seq: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        features = model.hidden // model.heads
        angles = torch.arange(seq)[:, None] * 1e4 ** -(torch.arange(0, features, 2) / features)
        self.register_buffer("cosine", angles.cos()[None, :, None])
        self.register_buffer("sine", angles.sin()[None, :, None])

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embedding(tokens)
        for layer in self.layers:
            states = layer(states, self.cosine, self.sine)
        logits: Tensor = self.head(self.norm(states))
        return logits


def plain_step(model: Model, seq: int) -> Step:
    with torch.device("cuda"):
        network = PlainLlama(model, seq)
    prepare(network, network.layers)
    return stepped(network, network)


def prepare(network: nn.Module, layers: Iterable[nn.Module]) -> None:
    for matrix in (one for one in network.parameters() if one.dim() > 1):
        nn.init.normal_(matrix, std=0.02)
    for layer in layers:
        layer.compile(dynamic=False)


def stepped(network: nn.Module, logits_of: Callable[[Tensor], Tensor], autocast: bool = True) -> Step:
    """The usual loop: mean cross-entropy, compiled as well, clipping, fused AdamW."""
    loss_of = torch.compile(mean_loss, dynamic=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = logits_of(tokens)
        loss = loss_of(logits, labels)
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


# -- transformers, TorchTitan ----------------------------------------------------------------------------


def transformers_step(model: Model, seq: int) -> Step:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=model.hidden, num_hidden_layers=model.layers, num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads, intermediate_size=model.ffn, vocab_size=model.vocab,
        max_position_embeddings=seq, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        network = transformers.LlamaForCausalLM(config)
    prepare(network, network.model.layers)
    return stepped(network, lambda tokens: network(input_ids=tokens).logits)


def torchtitan_step(model: Model, seq: int) -> Step:
    """Its model and its FSDP2 on one rank, as its own trainer makes them (0.2)."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("infra.parallelize", "model.args", "model.model")
    parallelize, args, decoder = (importlib.import_module(f"torchtitan.models.llama3.{name}") for name in names)
    multiple, wide = 1024, int(2 * 4 * model.hidden / 3)
    settings = args.TransformerModelArgs(
        dim=model.hidden, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.key_value_heads,
        vocab_size=model.vocab, multiple_of=multiple, ffn_dim_multiplier=model.ffn / wide, max_seq_len=seq,
    )  # fmt: skip
    with torch.device("meta"):
        network = decoder.Transformer(settings)
    for layer in network.layers.values():
        layer.compile(dynamic=False, fullgraph=True)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
    parallelize.apply_fsdp(network, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    network.to_empty(device="cuda")
    with torch.no_grad():
        network.init_weights(buffer_device=torch.device("cuda"))
    return stepped(network, network, autocast=False)


PEERS: dict[str, Callable[[Model, int], Step]] = {
    "plain": plain_step,
    "transformers": transformers_step,
    "torchtitan": torchtitan_step,
}


if __name__ == "__main__":
    sys.exit(main())

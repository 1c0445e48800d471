"""Networks that others wrote, the plain loop that trains them in one process, and the comparison with `parallelize`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from engine.rounding import negligible
from shardwise.engine.optim.optimizer import decays
from shardwise.engine.parallelize import Parallel, gather_state_dict, parallelize
from shardwise.engine.patterns import Patterns
from shardwise.measure.reference import Deviation, deviation, global_norm, relative
from shardwise.models.dot_product import AttentionArguments, dot_product_attention
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Optimization, Training

STEPS, SEQ, VOCAB = 3, 16, 61
OPTIMIZATION = Optimization(epsilon=1e-5)  # as in `verify`: rounding is not to be amplified
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GPT: dict[str, Any] = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64, "attn_pdrop": 0.0,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GEMMA = {**SMALL, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 12}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-tied": ("Llama", {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "pad_token_id": 3}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "mistral-window": ("Mistral", {**SMALL, "sliding_window": 5}),
    "mixtral": ("Mixtral", {**SMALL, **EXPERTS}),
    "qwen2-moe": ("Qwen2Moe", {**SMALL, **MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}),
    "olmo": ("Olmo", SMALL),
    "phi": ("Phi", {**SMALL, "num_key_value_heads": 4}),
    "olmo2": ("Olmo2", SMALL),
    "neox": ("GPTNeoX", SMALL),
    "gpt2": ("GPT2", GPT),
    "phi3": ("Phi3", {**SMALL, "sliding_window": 5}),
    "gemma": ("Gemma", GEMMA),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}),  # both bite
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window_pattern": 3}),
    "gpt-drops": ("GPT2", {**GPT, "attn_pdrop": 0.1}),
    "stablelm": ("StableLm", SMALL),
    "persimmon": ("Persimmon", SMALL),
    "qwen3-moe": ("Qwen3Moe", {**SMALL, **MOE, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]}),
}


class Perceptron(nn.Module):
    """A network that no table describes."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.LayerNorm(24)) for _ in range(3))
        self.end = nn.Linear(24, 5)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.start(features)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        outputs: Tensor = self.end(hidden)
        return outputs


class Mixer(nn.Module):
    """Attention of a network with a table of its own: any module with ``attend`` will do."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size, self.attend = width // heads, dot_product_attention
        self.read, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.write = nn.Linear(width, width)

    def forward(self, hidden: Tensor, documents: Tensor | None) -> Tensor:
        heads = [one(hidden).unflatten(-1, (-1, self.size)) for one in (self.read, self.key, self.value)]
        arguments = AttentionArguments(causal=True, window=None, scale=self.size**-0.5, documents=documents)
        mixed: Tensor = self.write(self.attend(*heads, arguments).flatten(-2))
        return mixed


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = Mixer(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, hidden: Tensor, documents: Tensor | None) -> Tensor:
        hidden = hidden + self.mixer(self.before(hidden), documents)
        return hidden + self.feed(self.after(hidden))


class Writer(nn.Module):
    """A small GPT as anybody would write it: learned positions, one matrix for both ends."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.out.weight = self.words.weight

    def forward(self, input_ids: Tensor, places: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if places is None:
            places = torch.arange(input_ids.shape[1])[None]
        hidden = self.words(input_ids) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden, documents)
        logits: Tensor = self.out(self.norm(hidden))
        return logits


WRITER = Patterns(
    layers="blocks.*",
    embedding="words",
    position_embedding="places",
    norm="norm",
    head="out",
    regions=("blocks.*.mixer", "blocks.*.feed"),
    columns={
        "blocks.*.mixer.read": "",
        "blocks.*.mixer.key": "key_value_heads",
        "blocks.*.mixer.value": "key_value_heads",
        "blocks.*.feed.0": "",
    },
    rows=("blocks.*.mixer.write", "blocks.*.feed.2"),
    attention="blocks.*.mixer",
    positions="places",
    documents="documents",
)
WRITER_MODEL = Model(layers=4, hidden=32, heads=4, ffn=64, vocab=VOCAB, max_seq=64, positions="learned",
                     tied_embeddings=True, name="writer")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A network, a strategy, and how many microbatches each data-parallel rank has."""

    network: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False)
    microbatches: int = 2
    precision: str = "fp32"

    @property
    def strategy(self) -> Strategy:
        return Strategy(**{"dp": 1, **self.fields})

    @property
    def samples(self) -> int:
        return self.strategy.data_parallel * self.strategy.microbatch * self.microbatches

    @property
    def training(self) -> Training:
        return Training(global_batch=self.samples, seq=SEQ, precision=self.precision, optimization=OPTIMIZATION)

    def parallelize(self, module: nn.Module, **arguments: Any) -> Parallel:
        if self.network != "writer":
            return parallelize(module, self.strategy, training=self.training, **arguments)
        return parallelize(module, self.job, patterns=WRITER, **arguments)

    @property
    def job(self) -> Job:
        cluster = cluster_from(f"laptop:{self.strategy.world}")
        return Job(model=WRITER_MODEL, cluster=cluster, strategy=self.strategy, training=self.training)


def build(network: str) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = Writer() if network == "writer" else Perceptron()
    if network in CLASSES:
        import transformers

        name, config = CLASSES[network]
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        kind = "TextConfig" if name == "Gemma3" else "Config"
        settings = getattr(transformers, f"{name}{kind}")(**config)
        if getattr(settings, "attn_logit_softcapping", None):
            settings._attn_implementation = "eager"  # what older releases take instead leaves the cap out
        module = getattr(transformers, f"{name}{head}")(settings)
    with torch.no_grad():  # all weights count: norms are not one, biases not zero, routers not even
        for one in module.parameters():
            one.add_(0.05 * torch.randn(one.shape))
    return module


def make_batch(network: str, samples: int, step: int) -> dict[str, Tensor]:
    """A global batch; answers are missing unevenly, so that means over parts are not means over all."""
    random = torch.Generator().manual_seed(100 + step)
    if network == "perceptron":
        labels = torch.randint(5, (samples,), generator=random)
        labels[::3] = -100
        return {"features": torch.randn((samples, 6), generator=random), "labels": labels}
    tokens = torch.randint(VOCAB, (samples, SEQ), generator=random)
    labels = tokens.clone()
    labels[torch.rand(tokens.shape, generator=random) < 0.4 * torch.rand((samples, 1), generator=random)] = -100
    labels[0, : SEQ // 2] = -100
    return {"input_ids": tokens, "labels": labels}


def summed_loss(outputs: Any, batch: Any) -> Tensor:
    """What a user would write, for either kind of network."""
    if "features" in batch:
        return F.cross_entropy(outputs, batch["labels"], ignore_index=-100, reduction="sum")
    labels = batch["shift_labels"] if "shift_labels" in batch else _shifted(batch["labels"])
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def predicted(batch: dict[str, Tensor]) -> Tensor:
    """What `summed_loss` sums over, of a network without a table."""
    return (batch["labels"][:, 1:] != -100).sum()


def _shifted(labels: Tensor) -> Tensor:
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)


def _call(module: nn.Module, batch: dict[str, Tensor]) -> Any:
    given = {name: one for name, one in batch.items() if name != "labels"}
    return module(**given, use_cache=False) if hasattr(module, "config") else module(**given)


@dataclass
class Plain:
    """The single process: what happened in each step, and the weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@cache
def plain_run(network: str, samples: int) -> Plain:
    """The network in a plain PyTorch loop."""
    module, found = build(network), Plain()
    several = dict(module.named_parameters())
    decayed = [one for name, one in several.items() if decays(name, one)]  # type: ignore[arg-type]
    others = [one for name, one in several.items() if not decays(name, one)]  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZATION.decay}, {"params": others, "weight_decay": 0.0}],
        lr=OPTIMIZATION.learning_rate, betas=(OPTIMIZATION.beta1, OPTIMIZATION.beta2), eps=OPTIMIZATION.epsilon,
    )  # fmt: skip
    for step in range(STEPS):
        batch = make_batch(network, samples, step)
        answers = batch["labels"] if network == "perceptron" else _shifted(batch["labels"])
        loss = summed_loss(_call(module, batch), batch) / (answers != -100).sum()
        loss.backward()
        found.losses.append(loss.item())
        found.gradients.append({name: one.grad.clone() for name, one in several.items() if one.grad is not None})
        found.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), OPTIMIZATION.clip_norm or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: one.detach().clone() for name, one in module.state_dict().items()}
    return found


def compare(case: Case, loss: Callable[[Any, Any], Tensor] | None = None) -> dict[str, Deviation]:
    """On one rank: the worst deviations of the parallel network from the plain one."""
    loss = summed_loss if case.network == "perceptron" else loss
    plain = plain_run(case.network, case.samples)
    count = None if case.network == "perceptron" or loss is None else predicted
    parallel = case.parallelize(build(case.network), loss=loss, count=count)
    rank, size = parallel.mesh.rank("dp"), parallel.mesh.size("dp")
    found: dict[str, list[Deviation]] = {kind: [] for kind in ("loss", "gradient", "weight", "norm", "gathered")}
    for step in range(STEPS):
        batch = make_batch(case.network, case.samples, step)
        mine = {name: one.chunk(size)[rank] for name, one in batch.items()}
        at = f"step {step + 1}"
        if step == 0:
            found["loss"].append(relative("evaluated", float(parallel.evaluate(mine)), plain.losses[0]))
        found["loss"].append(relative(at, float(parallel.forward_backward(mine)), plain.losses[step]))
        found["gradient"] += _gradients(parallel, plain.gradients[step], at)
        found["norm"].append(relative(at, float(parallel.update()), plain.norms[step]))
    rounding = frozenset(name for one in plain.gradients for name in negligible(one))
    norm = global_norm(plain.weights.values())
    for one in parallel.parameters:
        scale = norm if one.name in rounding else None
        found["weight"].append(deviation(one.name, one.parameter.detach(), one.part, plain.weights[one.name], scale))
    found["gathered"] += _gathered(parallel, plain, rounding, norm)
    return {kind: Deviation.worst(several) for kind, several in found.items()}


def _gradients(parallel: Parallel, expected: dict[str, Tensor], at: str) -> list[Deviation]:
    rounding, norm, found = negligible(expected), global_norm(expected.values()), []
    for one in parallel.parameters:
        if one.parameter.grad is None:
            found.append(Deviation(float("inf"), f"{one.name}, {at}: no gradient"))
            continue
        name = parallel.aliases.get(one.name, one.name)
        scale = norm if name in rounding else None
        found.append(deviation(f"{one.name}, {at}", one.parameter.grad, one.part, expected[name], scale))
    return found


def _gathered(parallel: Parallel, plain: Plain, rounding: frozenset[str], norm: float) -> list[Deviation]:
    """The state dict that a user saves: complete, and equal."""
    from shardwise.engine.parameters import HeldPart

    state = gather_state_dict(parallel)
    if dist.get_rank():
        return [Deviation(0.0 if not state else float("inf"), "a state dict beyond rank 0")]
    if state.keys() != plain.weights.keys():
        return [Deviation(float("inf"), str(sorted(state.keys() ^ plain.weights.keys())))]
    return [
        deviation(name, one, HeldPart(tuple(one.shape)), plain.weights[name], norm if name in rounding else None)
        for name, one in state.items()
    ]

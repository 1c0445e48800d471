"""The single process that every layout must match: the plain model in a plain loop, without the engine.

Also the weights, the data and the experts of every token that both use, and how far a layout is from the reference.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm

import torch
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.engine import Engine
from shardwise.engine.offload.store import MASTER
from shardwise.engine.parameters import HeldPart, divided_as, local, stored_weights
from shardwise.measure.plain import PlainModel, mixtures_of
from shardwise.models.adapters import is_of_adapter
from shardwise.models.decoder import DEVIATION, Decoder, initial_value, is_bias, is_norm
from shardwise.models.loss import IGNORED
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.network import NetworkLevel
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Optimization

# -- random weights and data, the same in every process and for every layout -------------------------


def sample_batch(job: Job, step: int, seed: int, device: str = "cpu") -> Batch:
    """The global batch of a step. Labels are missing unevenly, so that a mean of partial means would be wrong."""
    random = torch.Generator().manual_seed(1_000_003 * seed + step)
    if job.training.task == "dpo":
        return _sample_pairs(job, random).changed(lambda tensor: tensor.to(device))
    size = (job.sequences, job.training.seq)
    text = torch.randint(job.model.vocab, (size[0], size[1] + 1), generator=random)
    labels = text[:, 1:].clone()
    missing = torch.rand(size, generator=random) < 0.4 * torch.rand((size[0], 1), generator=random)
    labels[missing] = IGNORED
    labels[0, : size[1] // 2] = IGNORED
    return Batch.of(text[:, :-1].contiguous(), labels).changed(lambda tensor: tensor.to(device))


def _sample_pairs(job: Job, random: torch.Generator) -> Batch:
    """Rows of two pairs of answers, and a rest without labels; what counts is uneven."""
    rows, seq = job.sequences, job.training.seq
    text = torch.randint(job.model.vocab, (rows, seq + 1), generator=random)
    labels, documents = text[:, 1:].clone(), torch.zeros((rows, seq), dtype=torch.int64)
    for row in range(rows):
        ends = [seq * part // 10 + row % 3 for part in (2, 4, 7, 9)]
        for end in ends:
            documents[row, end:] += 1
    places = torch.arange(seq).expand(rows, -1)
    starts = torch.zeros_like(documents).scatter_reduce(1, documents, places, "amin", include_self=False)
    positions = torch.arange(seq) - starts.gather(1, documents)
    hidden = (torch.rand((rows, seq), generator=random) < 0.4) & (positions > 0)
    labels[hidden | (documents == 4)] = IGNORED
    return replace(Batch.of(text[:, :-1].contiguous(), labels, positions, documents), most_documents=5)


LENGTH = 0.1  # about that of a row of `DEVIATION`, for adapters with trained lengths


def sample_weight(name: str, shape: Iterable[int], seed: int, model: Model) -> Tensor:
    """A parameter of the unsharded model: its initial value, but with noise where that is zero or one.

    A bias of zero would hide that it is added twice; and rounding in AdamW is large relative to weights near zero. An
    adapter of zero would hide the gradient of its other half.
    """
    value = initial_value(name, shape, seed, model)
    if name.endswith(".adapter.magnitude"):
        value = value + LENGTH
    elif not (is_bias(name) or is_norm(name) or (is_of_adapter(name) and name.endswith(".b"))):
        return value
    digest = hashlib.sha256(f"sample {seed} {name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return value + DEVIATION * torch.randn(value.shape, generator=random)


def sample_engine(job: Job, seed: int, device: str) -> Engine:
    """An engine with the weights that the reference begins with."""
    engine = Engine(job, device=device, seed=seed)
    for held in engine.parameters:
        value = held.part.of(sample_weight(held.name, held.part.shape, seed, job.model))
        engine.optimizer.write(held.parameter, MASTER, divided_as(held.parameter, value))
    for codes in stored_weights(engine.stages.values()):
        codes.fill(lambda name, slices, codes=codes: sample_weight(name, codes.shape, seed, job.model)[slices])  # type: ignore[misc]
    engine.on_weights_loaded()
    return engine


def share(engine: Engine, step: int, seed: int) -> Batch:
    batch = sample_batch(engine.job, step, seed, engine.device.type)
    return batch.rows(engine.rows)


def reference_name(name: str, expected: Mapping[str, Tensor]) -> str:
    """The name in the unsharded model, which has a tied embedding and head once."""
    return "embedding.weight" if name == "head.weight" and name not in expected else name


# -- the single process ------------------------------------------------------------------------------

MOST_TOKENS = 1024  # in one pass, as whole sequences: logits of a large vocabulary are large


Routes = dict[str, tuple[Tensor, Tensor]]  # of each MoE layer: features that identify tokens, and their experts


@dataclass
class Reference:
    """Losses, gradients and routes of each step, and the final weights; named as in the unsharded model."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def reference_key(job: Job, steps: int, seed: int) -> str:
    """Equal for jobs that differ only in layout: a single process runs them alike."""
    training = job.training
    tuned = (training.adapters, training.trained, training.base_precision, training.task, training.preference)
    fields = (job.model, job.sequences, training.seq, training.optimization, tuned, steps, seed)
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:24]


def run_reference(job: Job, steps: int, seed: int, after_step: Callable[[], None] = lambda: None) -> Reference:
    """``steps`` AdamW steps of the unsharded model on `sample_batch`, in fp32."""
    model = PlainModel(job, lambda name, shape: sample_weight(name, shape, seed, job.model))
    trained = {name: parameter for name, parameter in model.weights.items() if parameter.requires_grad}
    reference, settings = Reference(), job.training.optimization
    # Biases of stacked experts have two dimensions.
    decayed = {name: parameter.dim() > 1 and not is_bias(name) for name, parameter in trained.items()}
    matrices = [parameter for name, parameter in trained.items() if decayed[name]]
    others = [parameter for name, parameter in trained.items() if not decayed[name]]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    routed = _record_routes(model.decoder)
    for step in range(steps):
        reference.losses.append(_gradients(model, job, step, seed))
        reference.routes.append({name: _concatenated(parts) for name, parts in routed.items()})
        routed.clear()
        reference.gradients.append(
            {name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None}
        )
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), settings.clip_norm or float("inf"))
        reference.gradient_norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        for _, mixture in mixtures_of(model.decoder):
            mixture.update_bias(mixture.load, job.model.numerics.bias_rate if mixture.is_trained else 0.0)
        after_step()
    reference.weights = {name: parameter.detach().clone() for name, parameter in model.weights.items()}
    return reference


def _gradients(model: PlainModel, job: Job, step: int, seed: int) -> float:
    """Runs forward and backward over one global batch, a few sequences at a time; the mean loss over its labels."""
    batch = sample_batch(job, step, seed)
    if job.training.adapters is not None and job.training.adapters.dropout:
        batch = batch.with_keys(seed, step, range(job.sequences), job.sequences)
    counted: Tensor | int = batch.counted if job.training.task != "dpo" else 2 * job.sequences
    for _, mixture in mixtures_of(model.decoder):
        mixture.balance_scale = job.model.numerics.balance_loss / job.sequences
    total = 0.0
    each = max(1, MOST_TOKENS // job.training.seq)
    for start in range(0, job.sequences, each):
        part = batch.changed(lambda tensor, start=start: tensor[start : start + each])  # type: ignore[misc]
        loss = model(part) / counted
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


# -- the experts of every token, the same in two runs ------------------------------------------------

# Features that tell tokens apart: FP8 moves a hidden state by percents of its norm, two tokens are about a norm apart.
COMPARED_FEATURES = 64
COMPARED_TOGETHER = 1024  # tokens at a time, each with all of the step: bounds the memory for distances


def _record_routes(model: Decoder) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Hooks every router, which then adds the tokens that it sees and their experts to the result."""
    routes: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def note(name: str, router: nn.Module, given: tuple[Tensor], made: tuple[Tensor, ...]) -> None:
        routes[name].append((_features(given[0]), made[0].clone()))

    for name, mixture in mixtures_of(model):
        mixture.router.register_forward_hook(partial(note, name))
    return routes


def _concatenated(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    features, experts = zip(*parts)
    return torch.cat(features), torch.cat(experts)


def hold_routes(stage: nn.Module, routes: Mapping[str, tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Makes routers send every token of a step to the experts that ``routes`` recorded for it.

    Rounding to FP8 moves some scores past others. Such a token would train another expert, and gradients would differ
    by far more than rounding although both runs are right. Tokens are matched by their nearest hidden state, because
    ranks and microbatches divide the batch differently.
    """
    for name, mixture in mixtures_of(stage):
        features, experts = (tensor.to(device) for tensor in routes[name])
        mixture.router.held = partial(_experts_of, features, experts)


def _experts_of(features: Tensor, experts: Tensor, hidden: Tensor) -> Tensor:
    parts = torch.split(_features(hidden), COMPARED_TOGETHER)
    return experts[torch.cat([torch.cdist(part, features).argmin(1) for part in parts])]


def _features(hidden: Tensor) -> Tensor:
    return hidden.detach()[:, :COMPARED_FEATURES].float().clone()


# -- deviations from the reference: relative differences, and what counts as rounding ----------------


TOLERANCE = 1e-5


@dataclass(frozen=True, order=True)
class Deviation:
    """A relative difference and the tensor that shows it."""

    value: float
    where: str

    @staticmethod
    def worst(deviations: Iterable[Deviation]) -> Deviation:
        return max(deviations, default=Deviation(0.0, ""))


def gradient_scales(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """What each gradient's deviation is relative to: its largest element, or more if its layer's rounding exceeds that.

    Some gradients are small differences of large terms: behind a softmax a score's is P·(dP − ΣP·dP), and if all dP
    are nearly equal, those of query and key are far smaller than the value's, which has the same terms. Each term is
    rounded to ε of itself, so a difference of up to ε times the largest gradient of the layer is rounding, however
    small the gradient is. With this scale error/scale ≤ tolerance means error ≤ max(tolerance·own, ε·layer's).
    """
    of_layers, rounded = largest_of_layers(gradients), torch.finfo(torch.float32).eps / TOLERANCE
    return {name: max(largest(gradient), rounded * of_layers[name]) for name, gradient in gradients.items()}


def weight_scales(
    weights: Mapping[str, Tensor], steps: Sequence[Mapping[str, Tensor]], settings: Optimization
) -> dict[str, float]:
    """What each weight's deviation is relative to: its largest element, plus rounding as AdamW amplifies it.

    A step is rate·g/(|g|+ϵ), whose slope is rate/ϵ for g far below ϵ: there a gradient's rounding, ε times the largest
    of its layer as in `gradient_scales`, moves a weight by rate/ϵ times as much; less with clipping.
    """
    scales = {name: largest(weight) for name, weight in weights.items()}
    rounded = torch.finfo(torch.float32).eps / TOLERANCE
    for gradients in steps:
        norm = global_norm(gradients.values())
        clipped = min(1.0, settings.clip_norm / norm) if settings.clip_norm and norm else 1.0
        carried = rounded * clipped * settings.learning_rate / settings.epsilon
        for name, gradient in largest_of_layers(gradients).items():
            scales[name] += carried * gradient
    return scales


def largest_of_layers(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """For each gradient the largest element of its layer."""
    of_layers: dict[str, float] = defaultdict(float)
    for name, gradient in gradients.items():
        of_layers[_layer(name)] = max(of_layers[_layer(name)], largest(gradient))
    return {name: of_layers[_layer(name)] for name in gradients}


def _layer(name: str) -> str:
    """`layers.3` of `layers.3.attention.key.weight`; the name itself outside of layers."""
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered[0] if numbered else name


def deviation(name: str, held: Tensor, part: HeldPart, whole: Tensor, absolute_scale: float | None = None) -> Deviation:
    """max|a-b| / max|b|, b being the full reference, or / ``absolute_scale``; a is this rank's shard of ``found``."""
    expected, mine = part.of(whole), local(held)
    if held.shape != expected.shape or not torch.isfinite(mine).all():
        return Deviation(float("inf"), name)
    scale = largest(whole) if absolute_scale is None else absolute_scale
    difference = largest(mine - divided_as(held, expected))
    return Deviation(difference / scale if scale else float(difference > 0), name)


def relative(name: str, actual: float, expected: float) -> Deviation:
    difference = abs(actual - expected)
    if not math.isfinite(difference):  # no order with others
        return Deviation(float("inf"), name)
    return Deviation(difference / abs(expected) if expected else difference, name)


def global_norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.float().norm() for tensor in tensors]).norm())


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


# -- what `verify` shrinks: a layout to fewer processes, a model to fewer and narrower layers --------


LONGEST_SEQUENCE = 256  # in a sequence of a small model
HEAD_SIZE, VOCABULARY = 16, 499  # a prime: no number of ranks divides it, so padding is tested too


def on_fewer_ranks(job: Job, most: int) -> Job:
    """The job itself if it has at most ``most`` ranks, otherwise with every degree above one reduced to two.

    Hybrid sharding keeps two shard groups, experts keep groups of their own, and dimensions their order.
    """
    if job.strategy.world <= most:
        return job
    old = job.strategy
    hybrid = old.zero > 0 and old.sharding_group < old.gradient_group
    tp, cp, dp, pp = (min(2, degree) for degree in (old.tp, old.cp, old.data_parallel, old.pp))
    if hybrid and cp * dp < 4:
        dp *= 2
    changes = {
        "tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": min(2, old.ep),
        "expert_tp": None if old.expert_tp is None else min(2, old.expert_tp),
        "shard_group": 2 if hybrid else None,
        "interleave": min(2, old.interleave),
    }  # fmt: skip
    strategy = old.unchecked(**{**changes, **_unlike(old, dp, pp)})
    if isinstance(old.stage_layers, tuple):
        strategy = strategy.unchecked(stage_layers=_merged(old.stage_layers, pp * strategy.chunks_per_rank))
    if strategy.world > most:
        raise SpecError(
            "⟨max_processes⟩",
            f"{most} are too few: the smallest layout with the same degrees above one has {strategy.world} ranks",
            f"use ⟨max_processes={strategy.world}⟩",
        )
    return sized(job, replace(strategy))  # checked


def _unlike(old: Strategy, dp: int, pp: int) -> dict[str, object]:
    """For unlike replicas the largest and smallest share; for unlike stages the degrees of the first and the last."""
    changes: dict[str, object] = {}
    if old.dp_shares is not None:
        shares = (max(old.dp_shares), min(old.dp_shares))
        changes["dp_shares"] = tuple(shares[number % 2] for number in range(dp)) if dp > 1 else None
    for name, degrees in (("stage_tp", old.stage_tp), ("stage_dp", old.stage_dp)):
        if degrees is not None:
            changes[name] = tuple(min(2, degrees[stage]) for stage in (0, -1)) if pp > 1 else None
    for name in ("tp", "dp"):
        if isinstance(kept := changes.get(f"stage_{name}"), tuple):
            changes[name] = max(kept)
    return changes


def sized(job: Job, strategy: Strategy) -> Job:
    """The job with another layout, on a cluster of its size and with a batch that fills its pipeline."""
    microbatches = min(job.microbatches, 2 * strategy.pp + 1)
    rounds = strategy.schedule_record.rounds(strategy.pp)
    microbatches = -(-microbatches // rounds) * rounds
    each = -(-microbatches // max(strategy.dp_shares or (1,)))
    sequences = -(-each * strategy.shares * strategy.microbatch // strategy.batch_multiple) * strategy.batch_multiple
    return replace(
        job,
        cluster=cluster_of(job.cluster, strategy.world),
        strategy=strategy,
        training=replace(job.training, global_batch=sequences),
    )


def cluster_of(cluster: Cluster, devices: int) -> Cluster:
    """``devices`` of the cluster's devices behind one switch, in nodes of at most half of them."""
    inner = next((size for size in range(max(1, devices // 2), 0, -1) if devices % size == 0), 1)
    first = cluster.levels[0]
    levels = [_level(first, inner)] if inner > 1 or devices == 1 else []
    if devices // inner > 1:
        levels.append(_level(cluster.levels[-1], devices // inner))
    return Cluster(device=cluster.device, levels=tuple(levels), devices_per_node=inner)


def _level(level: NetworkLevel, size: int) -> NetworkLevel:
    return NetworkLevel(name=level.name, size=size, link=level.link, topology="switch")


def _merged(counts: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Layers per stage for fewer stages: neighbours are merged."""
    each = len(counts) / stages
    return tuple(sum(counts[round(i * each) : round((i + 1) * each)]) for i in range(stages))


def with_small_model(job: Job) -> Job:
    """A model of the same kind, a few layers deep and some tens of features wide, that the layout can still divide."""
    strategy, model = job.strategy, job.model
    chunks = strategy.stages
    layers = 2 * chunks if chunks > 1 else min(model.layers, 4)
    ratio = model.heads // model.key_value_heads
    kv_heads = strategy.tp // 2 if model.key_value_heads < strategy.tp else lcm(strategy.tp * strategy.cp, 2)
    heads = lcm(kv_heads * min(ratio, 2), strategy.tp * strategy.cp)
    width = 8 * lcm(strategy.tp, strategy.expert_tensor_parallel, 4)
    small = {
        "layers": layers, "hidden": heads * HEAD_SIZE, "heads": heads, "kv_heads": max(1, kv_heads),
        "head_dim": HEAD_SIZE, "ffn": 2 * width, "vocab": min(model.vocab, VOCABULARY), "name": f"small {model.name}",
        "mla": _small_latent(model), "moe": _small_experts(model, strategy, width), "published_parameters": None,
        "max_seq": min(model.max_seq, LONGEST_SEQUENCE),
        "pattern": tuple(replace(layer, repeat=1) for layer in model.pattern),
        **{name: _small_span(getattr(model, name), job.training.seq) for name in ("sliding_window", "attention_chunk")},
    }  # fmt: skip
    return replace(
        job,
        model=replace(model, **small),  # type: ignore[arg-type]
        strategy=replace(strategy, stage_layers="even"),
        training=replace(job.training, seq=min(job.training.seq, LONGEST_SEQUENCE), global_batch=job.sequences),
    )


def _small_span(span: int | None, seq: int) -> int | None:
    """A window or chunk that hides keys of the small sequences where it does of the large ones."""
    return span if span is None or span >= seq else min(span, min(seq, LONGEST_SEQUENCE) // 3)


def _small_latent(model: Model) -> object:
    if model.mla is None:
        return None
    rank = None if model.mla.q_rank is None else 24
    return replace(model.mla, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16, q_rank=rank)


def _small_experts(model: Model, strategy: Strategy, width: int) -> object:
    moe = model.moe
    if moe is None:
        return None
    experts = lcm(8, strategy.ep)
    return replace(
        moe, experts=experts, top_k=min(moe.top_k, 2), ffn=width, shared_ffn=width if moe.shared_ffn else 0,
        dense_layers=min(moe.dense_layers, 1), groups=min(moe.groups, 4), groups_used=min(moe.groups_used, 2),
    )  # fmt: skip

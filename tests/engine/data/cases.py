"""Training under data parallelism and without it: what the tests of it compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.engine.data.apply import apply_data
from shardwise.engine.experts.apply import apply_experts
from shardwise.engine.mesh import build_mesh
from shardwise.engine.optim.one_pass import GradientNorm, clip_divisor
from shardwise.engine.optim.optimizer import LocalOptimizer, local
from shardwise.engine.optim.precision import FP32, Precision
from shardwise.engine.parameters import parts_of
from shardwise.models import Decoder, initialise, moe
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Optimization, Training

# Sizes that 2 and 4 ranks do not divide, biases, norms with biases.
UNEVEN = Model(
    layers=3, hidden=18, heads=3, kv_heads=1, ffn=30, vocab=37, max_seq=16, activation="swiglu", attention_out_bias=True
)
TIED = replace(UNEVEN, tied_embeddings=True, positions="learned", activation="gelu", layers=2)
# A grouped product wants rows of 16 bytes.
MIXTURE = replace(
    UNEVEN, hidden=20, heads=5, moe=MixtureOfExperts(experts=4, top_k=2, ffn=12, shared_ffn=6, dense_layers=1)
)
SEQUENCES, LENGTH = 12, 8
MAXIMUM_NORM = 0.05  # small enough that every step is clipped
EPSILON = 1e-6  # with 1e-8, elements whose gradients are next to zero would move by rounding errors alone


@dataclass(frozen=True)
class Case:
    strategy: Strategy
    model: Model = UNEVEN
    microbatches: int = 1
    frozen: tuple[str, ...] = ()
    steps: int = 3
    optimizer: str = "adamw"
    precision: Precision = FP32
    on_meta: bool = False


@dataclass
class Trained:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the first step, before clipping
    weights: dict[str, Tensor]
    notes: dict[str, Any]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 37, (SEQUENCES, LENGTH), generator=generator)
    labels = torch.randint(0, 37, (SEQUENCES, LENGTH), generator=generator)
    labels[::3, 2:6] = -100  # so that ranks and microbatches count different numbers of labels
    labels[1] = -100
    return tokens, labels


def network(case: Case) -> Decoder:
    module = Decoder(case.model)
    initialise(module, 3, case.model)
    for mixture in module.modules():
        if isinstance(mixture, moe.MoELayer):
            mixture.balance_scale = 0.01 / SEQUENCES
    generator = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:  # a bias of zero would be all Adam's sum of signs, however small its gradient
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.requires_grad_(not name.startswith(case.frozen or ("none of them",)))
    return module


def alone(case: Case) -> Trained:
    """PyTorch and nothing else, in one process; the whole batch at once."""
    module = network(case)
    trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
    vectors = [one for one in trained.values() if one.dim() == 1]
    matrices = [one for one in trained.values() if one.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=EPSILON)
    tokens, labels = batch()
    result = Trained([], [], {}, {}, {})
    for _ in range(case.steps):
        loss = module(tokens, labels) / (labels != -100).sum()
        loss.backward()
        result.gradients = result.gradients or {name: one.grad.clone() for name, one in trained.items()}
        result.losses.append(loss.item())
        result.norms.append(float(nn.utils.clip_grad_norm_(trained.values(), MAXIMUM_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    result.weights = {name: one.detach() for name, one in module.named_parameters()}
    return result


def together(case: Case) -> Trained:
    """The same on every rank of a world, each with its share of the batch."""
    mesh = build_mesh(case.strategy)
    module = network(case)
    values = {name: one.detach().clone() for name, one in module.named_parameters()}
    if case.on_meta:
        with torch.device("meta"):
            module = Decoder(case.model)
    if case.model.moe:
        apply_experts(module, mesh, case.strategy, lambda rank: 0)
    data = apply_data(module, mesh, case.precision)
    if case.on_meta:
        module.to_empty(device="cpu")
        fill(module, values)
    data.start()
    optimization = Optimization(learning_rate=1e-3, epsilon=EPSILON)
    training = Training(precision="fp32", optimizer=case.optimizer, optimization=optimization)
    optimizer = LocalOptimizer(module.named_parameters(), training, masters=data.masters)
    parameters = {name: one for name, one in module.named_parameters() if one.requires_grad}
    parts = parts_of(module)
    copies = [copies_of(one, parts[name].expert, mesh.strategy) for name, one in parameters.items()]
    norm_of = GradientNorm(copies, "cpu")
    tokens, labels = batch()
    counted = (labels != -100).sum()
    each = SEQUENCES // case.strategy.data_parallel
    mine = slice(mesh.rank("dp") * each, (mesh.rank("dp") + 1) * each)
    result = Trained([], [], {}, {}, {"bytes": []})
    for step in range(case.steps):
        total = torch.zeros(())
        shares = list(zip(tokens[mine].chunk(case.microbatches), labels[mine].chunk(case.microbatches)))
        for number, (some, theirs) in enumerate(shares):
            data.before_microbatch(last=number == len(shares) - 1)
            loss = module(some, theirs) / counted
            loss.backward()
            total += loss.detach()
            if step == 1:
                result.notes["bytes"].append(held_bytes(module))
        dist.all_reduce(total)
        gradients = [None if one.grad is None else local(one.grad) for one in parameters.values()]
        result.gradients = result.gradients or {name: whole(one.grad) for name, one in parameters.items()}
        result.losses.append(total.item())
        norm = norm_of(gradients)
        result.norms.append(norm.item())
        optimizer.step(divisor=clip_divisor(norm, MAXIMUM_NORM))
        optimizer.zero_grad()
        data.after_step()
    result.notes |= {"optimizer": optimizer_bytes(optimizer), "parts": parts_of(module)}
    result.weights = {name: whole(data.masters.get(one, one)) for name, one in module.named_parameters()}
    return result


@torch.no_grad()
def fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            given = distribute_tensor(values[name], parameter.device_mesh, parameter.placements, src_data_rank=None)
            local(parameter).copy_(given.to_local())
        else:
            parameter.copy_(values[name])


def copies_of(parameter: Tensor, expert: bool, strategy: Strategy) -> int:
    divided = parameter.device_mesh.size() // _replicas(parameter) if isinstance(parameter, DTensor) else 1
    return (strategy.expert_data_parallel if expert else strategy.gradient_group) // divided


def _replicas(parameter: DTensor) -> int:
    return parameter.device_mesh.size(0) if parameter.device_mesh.ndim > 1 else 1


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def held_bytes(module: nn.Module) -> dict[str, int]:
    """Bytes of parameters and gradients that are alive on this rank, each storage once."""
    weights: dict[int, int] = {}
    gradients: dict[int, int] = {}
    for tensors, found in ((_weights(module), weights), (_gradients(module), gradients)):
        for one in tensors:
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return {"weights": sum(weights.values()), "gradients": sum(gradients.values())}


def _groups(module: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    from shardwise.engine.torch_private import parameter_groups

    return [group for one in module.modules() if isinstance(one, FSDPModule) for group in parameter_groups(one)]


def _records(module: nn.Module) -> list[Any]:
    return [record for group in _groups(module) for record in group.fsdp_params]


def _weights(module: nn.Module) -> list[Tensor]:
    records = _records(module)
    if not records:
        return list(module.parameters())
    return [one for record in records for one in (record._sharded_param_data, *record.all_gather_outputs)]


def _gradients(module: nn.Module) -> list[Tensor]:
    records = _records(module)
    if not records:
        return [one.grad for one in module.parameters() if one.grad is not None]
    found = [record.unsharded_accumulated_grad for record in records]
    found += [record._unsharded_param.grad for record in records if hasattr(record, "_unsharded_param")]
    found += [record.sharded_param.grad for record in records]
    found += [group._partial_reduce_output for group in _groups(module)]  # of hybrid sharding, until the last
    return [local(one) for one in found if one is not None]


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(local(one).numel() * 4 for state in optimizer.state.values() for one in state.values())


def deviation(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()

"""Small jobs in FP8, and what one rank of them computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.engine.engine import Engine, apply_compile
from shardwise.engine.parameters import local
from shardwise.engine.patterns import DECODER
from shardwise.engine.torch_private import TorchDispatchMode, operator_name
from shardwise.measure.reference import sample_batch
from shardwise.models.layer import Layer
from shardwise.spec import Job

PRECISIONS = ("fp8", "fp8-rowwise", "fp8-blockwise")
SCALINGS = ("tensor", "row", "block")
# Attention of bf16 on a CPU is slow: short sequences, several of which make a block of 128 tokens.
MODEL = {"name": "small", "hidden": 128, "layers": 2, "heads": 2, "ffn": 256, "vocab": 128, "max_seq": 32,
         "activation": "swiglu", "norm": "rmsnorm"}  # fmt: skip


def job_of(precision: str, ranks: int = 1, *, model: Any = None, global_batch: int = 8, **strategy: Any) -> Job:
    """Two microbatches of 128 tokens, unless there is another ``global_batch``."""
    training = {"precision": precision, "seq": 32, "global_batch": global_batch}
    strategy = {"microbatch": 4} | strategy
    return Job.from_dict(
        {"model": MODEL | (model or {}), "cluster": f"laptop:{ranks}", "training": training, "strategy": strategy}
    )


def trained(job: Job, steps: int = 2) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of some steps, and this rank's weights at the end."""
    engine = Engine(job)
    losses, norms = [], []
    for step in range(steps):
        result = engine.step(share(engine, step))
        losses.append(float(result.loss))
        norms.append(float(result.gradient_norm))
    return losses, norms, {one.name: local(engine.weight(one)).clone() for one in engine.parameters}


def share(engine: Engine, step: int) -> Any:
    return sample_batch(engine.job, step, 0).share(engine.mesh.rank("dp"), engine.mesh.size("dp"))


class Counted(TorchDispatchMode):
    """How often casts of weights, casts of others, and matmuls of FP8 have run."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = self.others = self.matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator_name(func)
        if name == "shardwise::fp8_cast":
            self.weights += args[4]
            self.others += not args[4]
        self.matmuls += name == "shardwise::fp8_product"
        return func(*args, **(kwargs or {}))


def counts(job: Job) -> list[tuple[int, int, int]]:
    """The same of each of two steps."""
    engine, found = Engine(job), []
    for step in range(2):
        with Counted() as mode:
            engine.step(share(engine, step))
        found.append((mode.weights, mode.others, mode.matmuls))
    return found


def compiled_layers(job: Job) -> tuple[list[float], int]:
    """Losses of two steps with compiled layers, and the FP8 matmuls of the second; by no compiler for C++."""
    torch._dynamo.reset()
    engine = Engine(job)
    apply_compile(list(engine.stages.values()), job.strategy, DECODER, backend="aot_eager")
    losses = [float(engine.step(share(engine, 0)).loss)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        losses.append(float(engine.step(share(engine, 1)).loss))
    return losses, sum(one.count for one in profile.key_averages() if one.key == "shardwise::fp8_product")


def parts(scaling: str, kind: str, rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What a rank of cut layers computes, and what it should: its part of what one process computes."""
    import torch.distributed as dist

    from shardwise.engine.fp8.linear import ScaledProducts

    random = torch.Generator().manual_seed(0)

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        # Ranks whose largest elements differ, so that a rank's own scale would be another.
        spread = torch.linspace(1, 7, shape[-1])
        return (torch.randn(*shape, generator=random) * spread * scale).bfloat16()

    hidden, weights, gradients = tensor(2, 128, 512), [tensor(512, 512, scale=0.02)], [tensor(2, 128, 512)]

    def run(products: ScaledProducts, hidden: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
        hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        (output,) = products(hidden, [weight], None)
        output.backward(gradient)
        assert hidden.grad is not None and weight.grad is not None
        return [output.detach(), hidden.grad, weight.grad]

    alone = run(ScaledProducts(scaling), hidden, weights[0], gradients[0])
    group, mine = dist.group.WORLD, slice(rank * 512 // size, (rank + 1) * 512 // size)
    names = ("output", "of hidden", "of weight")
    if kind == "rows":
        products = ScaledProducts(scaling, inputs_over=group)
        found = run(products, hidden[..., mine], weights[0][:, mine], gradients[0])
        dist.all_reduce(found[0])
        expected = [alone[0], alone[1][..., mine], alone[2][:, mine]]
        return dict(zip(names, zip(found, expected)))
    gathered = kind == "gathered columns"
    products = ScaledProducts(scaling, outputs_over=group, entry="gathered" if gathered else "copied")
    own = slice(rank * 128 // size, (rank + 1) * 128 // size) if gathered else slice(None)
    found = run(products, hidden[:, own], weights[0][mine], gradients[0][..., mine])
    expected = [alone[0][..., mine], alone[1][:, own], alone[2][mine]]
    return dict(zip(names, zip(found, expected)))


def parts_here(scaling: str, kind: str) -> dict[str, float]:
    """The relative error of each tensor on this rank."""
    import torch.distributed as dist

    found = parts(scaling, kind, dist.get_rank(), dist.get_world_size())
    return {name: error(one, other.double()) for name, (one, other) in found.items()}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def own_network(precision: str, strategy: Any) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a network of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardwise.engine.parallelize import parallelize
    from shardwise.spec.strategy import Strategy
    from shardwise.spec.training import Training

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=16, **shape))
    training = Training(global_batch=2, seq=16, precision=precision)
    parallel = parallelize(network, Strategy(microbatch=2, **strategy), training=training)
    random = torch.Generator().manual_seed(0)
    results = []
    for _ in range(2):
        tokens = torch.randint(61, (2, 16), generator=random)
        results.append(parallel.step({"input_ids": tokens, "labels": tokens}))
    return [float(one.loss) for one in results], [float(one.gradient_norm) for one in results]


def wide_bytes_in_use(job: Job) -> int:
    """Memory of the weights of linear layers as they are seen in a forward pass."""
    engine = Engine(job)
    found: list[int] = []
    layers = [one for stage in engine.stages.values() for one in stage.modules() if isinstance(one, Layer)]
    for layer in layers:
        linear = layer.mlp.down
        linear.register_forward_pre_hook(lambda one, _: found.append(one.weight.untyped_storage().nbytes()))
    engine.step(share(engine, 0))
    assert len(found) >= len(layers)
    return sum(found)


def gradients_here(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
    """Weights as they are multiplied, the gradients of one batch, and the batch."""
    engine = Engine(job)
    batch = share(engine, 0)
    weights = {one.name: one.parameter.detach().clone() for one in engine.parameters}
    engine.forward_backward(batch)
    found = {one.name: engine.gradient(one) for one in engine.parameters}
    return weights, {name: one.clone() for name, one in found.items() if one is not None}, batch.tokens, batch.labels


def compiled_gradients(job: Job) -> dict[str, Tensor]:
    """Of two microbatches, with compiled layers."""
    torch._dynamo.reset()
    engine = Engine(job)
    apply_compile(list(engine.stages.values()), job.strategy, DECODER, backend="aot_eager")
    engine.forward_backward(share(engine, 0))
    found = {one.name: engine.gradient(one) for one in engine.parameters}
    return {name: one.clone() for name, one in found.items() if one is not None}


def histories_here(job: Job) -> tuple[Tensor, list[float]]:
    """Of delayed scaling after two steps and an evaluation; and the losses."""
    engine = Engine(job)
    losses = [float(engine.step(share(engine, step)).loss) for step in range(2)]
    engine.evaluate(share(engine, 2))
    assert engine.delayed is not None
    return engine.delayed.history, losses

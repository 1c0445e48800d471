"""The optimizer and the gradient norm against PyTorch's own, whole and divided."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from engine.workers import on_ranks
from shardwise.engine.optim.one_pass import GradientNorm, clip_divisor
from shardwise.engine.optim.optimizer import LocalOptimizer, decays, local, master_values, split_
from shardwise.engine.optim.updates import orthogonal
from shardwise.spec.training import Optimization, Training
from shardwise.training.memory import TensorBytes

SHAPES = {
    "embedding.weight": (11, 6),
    "layers.0.attention.query.weight": (6, 6),
    "layers.0.mlp.up.weight": (9, 6),
    "layers.0.mlp.experts.down": (3, 4, 6),
    "layers.0.mlp_norm.weight": (6,),
    "layers.0.mlp.experts.down_bias": (3, 6),
    "head.bias": (11,),
}
RATE, STEPS = 0.05, 4
OPTIMIZATION = Optimization(learning_rate=RATE)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def ours(kind: str, given: dict[str, nn.Parameter]) -> LocalOptimizer:
    return LocalOptimizer(given.items(), Training(optimizer=kind, optimization=OPTIMIZATION))


def theirs(kind: str, given: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    decayed = [one for name, one in given.items() if decays(name, one)]
    others = [one for name, one in given.items() if not decays(name, one)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    return torch.optim.SGD(groups, lr=RATE, momentum=0.95 if kind == "sgd-momentum" else 0.0)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sgd-momentum"])
def test_updates_are_those_of_pytorch(kind: str) -> None:
    mine, other = parameters(), parameters()
    first, second = ours(kind, mine), theirs(kind, other)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            mine[name].grad, other[name].grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    for name, one in mine.items():
        torch.testing.assert_close(one, other[name], rtol=2e-6, atol=2e-6)


def test_vectors_and_biases_do_not_decay() -> None:
    decayed = {name for name, one in parameters().items() if decays(name, one)}
    assert decayed == {
        name for name in SHAPES if name.endswith(("embedding.weight", "query.weight", "up.weight", "experts.down"))
    }


def test_a_schedule_of_pytorch_drives_it() -> None:
    mine = parameters()
    optimizer = ours("adamw", mine)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = mine["head.bias"].detach().clone()
    for _ in range(2):
        mine["head.bias"].grad = torch.ones(11)
        optimizer.step()
        schedule.step()
    assert torch.allclose(before - mine["head.bias"], torch.full((11,), RATE * 1.5), atol=1e-4)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sgd-momentum", "muon"])
def test_a_bad_step_changes_nothing(kind: str) -> None:
    mine, expected = parameters(), parameters()
    first, second = ours(kind, mine), ours(kind, expected)
    for step, bad in enumerate((0.0, 1.0, 0.0)):
        for name, gradient in gradients(step).items():
            mine[name].grad = gradient / (0.0 if bad else 1.0)
            expected[name].grad = gradient
        first.step(bad=torch.tensor(bad))
        if not bad:
            second.step(bad=torch.tensor(0.0))
    for name, one in mine.items():
        assert torch.equal(one, expected[name])
        for state, tensor in first.state[one].items():
            assert torch.equal(tensor, second.state[expected[name]][state])


def test_gradients_are_divided_on_the_way() -> None:
    """As after loss scaling or by clipping, without a pass over them of its own."""
    mine, expected = parameters(), parameters()
    first, second = ours("adamw", mine), ours("adamw", expected)
    for name, gradient in gradients(0).items():
        mine[name].grad, expected[name].grad = gradient * 8, gradient.clone()
    first.step(divisor=torch.tensor(8.0))
    second.step()
    for name, one in mine.items():
        torch.testing.assert_close(one, expected[name], rtol=1e-6, atol=1e-6)


def test_masters_are_updated_and_16_bit_weights_follow() -> None:
    exact, narrow = parameters(), parameters()
    masters = {one: one.detach().clone() for one in narrow.values()}
    for one in narrow.values():
        one.data = one.to(torch.bfloat16)
    first = ours("adamw", exact)
    second = LocalOptimizer(narrow.items(), Training(optimization=OPTIMIZATION), masters=masters)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            exact[name].grad, narrow[name].grad = gradient.bfloat16().float(), gradient.bfloat16()
        first.step()
        second.step()
    for name, one in exact.items():
        torch.testing.assert_close(second.values(narrow[name]), one.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(narrow[name], one.to(torch.bfloat16))


@pytest.mark.parametrize("with_masters", [False, True])
def test_a_state_that_was_saved_goes_on(with_masters: bool) -> None:
    def made() -> tuple[dict[str, nn.Parameter], LocalOptimizer]:
        given = parameters()
        masters = {one: one.detach().clone() for one in given.values()} if with_masters else {}
        for one in given.values():
            one.data = one.to(torch.bfloat16 if with_masters else torch.float32)
        return given, LocalOptimizer(given.items(), Training(optimization=OPTIMIZATION), masters=masters)

    (mine, first), (other, second) = made(), made()
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            mine[name].grad, other[name].grad = (gradient.to(mine[name].dtype) for _ in range(2))
        if step == 2:
            for name, one in mine.items():
                other[name].data.copy_(one.data)
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        first.step()
        if step >= 2:
            second.step()
    for name, one in mine.items():
        assert torch.equal(one, other[name]) and torch.equal(first.values(one), second.values(other[name]))


def test_moments_in_bf16_take_nearly_the_same_steps_in_half_the_memory() -> None:
    mine, exact = parameters(), parameters()
    first, second = ours("adamw-bf16-moments", mine), ours("adamw", exact)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            mine[name].grad, exact[name].grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    for name, one in mine.items():
        assert all(state.dtype == torch.bfloat16 for state in first.state[one].values())
        moved = (second.values(exact[name]) - parameters()[name]).abs().max()
        assert 0 < (one - exact[name]).abs().max() < 0.02 * moved


def test_masters_in_two_halves_are_the_same_numbers() -> None:
    """Also the largest, the smallest and both zeros; of those half way between two weights to the last bit."""
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([0, -(2**31), 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 1, 0x7F800000])
    values = torch.cat([bits, edges]).to(torch.int32).view(torch.float32)
    values = values[~values.isnan()]
    weight, rest = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int16)
    split_(values, weight, rest)
    assert torch.equal(weight, values.to(torch.bfloat16))
    found, expected = (one.view(torch.int32) for one in (master_values(weight, rest), values))
    between = expected % 2**16 == 2**15  # of two equally near weights: there the last bit may go
    assert torch.equal(found[~between], expected[~between]) and between.any()
    assert ((expected - found)[between].clamp(0, 1) == (expected - found)[between]).all()
    split_(master_values(weight, rest), weight, rest)
    assert torch.equal(master_values(weight, rest).view(torch.int32), found) and torch.equal(
        weight, values.to(torch.bfloat16)
    )


@pytest.mark.parametrize("kind", ["adamw", "sgd-momentum", "muon"])
def test_whole_masters_and_their_rests_take_the_same_steps(kind: str) -> None:
    found = []
    for whole in (True, False):
        given = parameters()
        masters = {one: one.detach().clone() for one in given.values()}
        for one in given.values():
            one.data = one.to(torch.bfloat16)
        training = Training(optimizer=kind, optimization=OPTIMIZATION)
        optimizer = LocalOptimizer(given.items(), training, masters=masters, whole_masters=whole)
        for step in range(STEPS):
            for name, gradient in gradients(step).items():
                given[name].grad = gradient.bfloat16()
            optimizer.step(bad=torch.tensor(float(step == 1)))
        assert len(optimizer.rests) == (0 if whole else len(given))
        for one in given.values():  # as a checkpoint does
            values = optimizer.read(one, "master").clone()
            optimizer.write(one, "master", torch.zeros_like(values))
            optimizer.write(one, "master", values)
            assert torch.equal(optimizer.read(one, "master"), values)
            assert optimizer.dtype(one, "master") == torch.float32
        found.append([optimizer.read(one, "master") for one in given.values()])
    for first, second in zip(*found):
        torch.testing.assert_close(first, second, rtol=2.0**-23, atol=0)


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adamw() -> None:
    for shape in ((3, 5, 8), (2, 8, 5)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.4 and values.max() < 1.4
    mine, other = parameters(), parameters()
    matrices = [other[name] for name in ("layers.0.attention.query.weight", "layers.0.mlp.up.weight")]
    optimizer, reference = ours("muon", mine), torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1)
    adamw = theirs("adamw", other)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            mine[name].grad, other[name].grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
        for one in matrices:
            one.grad = None
        adamw.step()
    for name in ("layers.0.attention.query.weight", "layers.0.mlp.up.weight"):
        torch.testing.assert_close(mine[name], other[name], rtol=2e-2, atol=2e-2)  # PyTorch's products are in bf16
    torch.testing.assert_close(mine["embedding.weight"], other["embedding.weight"], rtol=2e-6, atol=2e-6)


def divided_updates(kind: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    given = {
        name: nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)])) for name, one in parameters().items()
    }
    optimizer = ours(kind, given)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            given[name].grad = distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
    assert all(
        isinstance(state["momentum_buffer"], DTensor)
        for state in optimizer.state.values()
        if "momentum_buffer" in state
    )
    return {name: one.full_tensor().detach() for name, one in given.items()}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("world", [2, 4])
def test_divided_parameters_are_updated_alike(kind: str, world: int) -> None:
    """Four ranks and three experts: one rank holds nothing."""
    whole = parameters()
    optimizer = ours(kind, whole)
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            whole[name].grad = gradient
        optimizer.step()
    for found in on_ranks(world, divided_updates, kind):
        for name, one in whole.items():
            torch.testing.assert_close(found[name], one.detach(), rtol=1e-5, atol=1e-5)


def norm_of_parts() -> tuple[float, list[Tensor]]:
    """A tensor cut over all ranks, one that two hold each half of, one that all hold, and one that is not counted."""
    rank = torch.distributed.get_rank()
    given = gradients(0)
    cut, halves = (
        given["embedding.weight"].tensor_split(4)[rank],
        given["layers.0.mlp.up.weight"].tensor_split(2)[rank % 2],
    )
    pieces = [cut.clone(), halves.clone(), given["head.bias"].clone(), torch.full((3,), 1e3), None]
    norm = GradientNorm([1, 2, 4, 0, 1], "cpu")(pieces)
    divisor = clip_divisor(norm, 0.5)
    return norm.item(), [one / divisor for one in pieces[:3] if one is not None]


def test_every_element_counts_once_in_the_norm() -> None:
    whole = {name: gradients(0)[name] for name in ("embedding.weight", "layers.0.mlp.up.weight", "head.bias")}
    counted = [nn.Parameter(torch.zeros_like(one)) for one in whole.values()]
    for one, gradient in zip(counted, whole.values()):
        one.grad = gradient.clone()
    expected = float(nn.utils.clip_grad_norm_(counted, 0.5))
    for norm, pieces in on_ranks(4, norm_of_parts):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert counted[2].grad is not None
        torch.testing.assert_close(pieces[2], counted[2].grad)


def test_the_local_tensor_of_a_whole_one_is_itself() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert local(parameter).data_ptr() == parameter.data_ptr()


def test_no_master_stays_whole_while_other_states_are_allocated() -> None:
    """A bf16 weight, half a master, two moments: 12 bytes, and once the fp32 master that is being split."""
    given = {f"layers.{number}.weight": nn.Parameter(torch.zeros(64, 64)) for number in range(16)}
    elements = sum(one.numel() for one in given.values())
    masters: dict[nn.Parameter, Tensor] = {}
    for one in given.values():
        masters[one] = one.detach().clone()
        one.data = one.to(torch.bfloat16)
    memory = TensorBytes()
    memory.watch([*given.values(), *masters.values()])
    with memory:
        optimizer = LocalOptimizer(given.items(), Training(optimization=OPTIMIZATION), masters=masters)
    assert len(optimizer.rests) == 16 and not masters
    assert memory.live == pytest.approx(12 * elements, rel=0.001)  # scalars besides
    assert memory.peak < 13.5 * elements

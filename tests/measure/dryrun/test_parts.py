"""The parts of a dry run by themselves: the fake world, what is noted of operators, extension, requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardwise.collectives import CollectiveKind
from shardwise.engine.collectives.reductions import all_gather, reduce_scatter_sum
from shardwise.engine.profiler_ranges import named, sent
from shardwise.layout.groups import coordinates
from shardwise.measure.dryrun.memory import LayerKind, MemoryLog, Places, StepPlace
from shardwise.measure.dryrun.result import RECEIVE, Compared, TracedCollective, check_rank, fullest_rank, resized
from shardwise.measure.dryrun.run import traced_bytes
from shardwise.measure.dryrun.trace import TracedShape, alike, at_one_moment, extension
from shardwise.measure.dryrun.world import CollectiveLog, FlopLog, fake_tensors, posing_as
from shardwise.models.norms import RMSNorm
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.training.memory import TensorBytes


def job(strategy: dict[str, Any], cluster: str = "dgx-h100:2", model: str = "tiny", **training: Any) -> Job:
    fields = {"model": model, "cluster": cluster, "strategy": strategy, "training": {"seq": 128, **training}}
    return Job.from_dict(fields)


# -- the fake world ----------------------------------------------------------------------------------


def test_a_fake_world_leaves_nothing_behind() -> None:
    functions = F.rms_norm, F.scaled_dot_product_attention, RMSNorm.forward, torch.Tensor.softmax
    with posing_as(rank=700, world=1024), fake_tensors():
        assert (dist.get_rank(), dist.get_world_size()) == (700, 1024)
        assert F.rms_norm is not functions[0]
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        work = dist.isend(tensor, 1)
        assert work is not None and work.is_completed()  # nothing sent waits for a peer that is not there
    assert not dist.is_initialized()
    assert functions == (F.rms_norm, F.scaled_dot_product_attention, RMSNorm.forward, torch.Tensor.softmax)
    assert float(torch.ones(1)) == 1.0


def test_a_second_world_is_refused_and_the_first_one_stays() -> None:
    with posing_as(0, 4):
        with pytest.raises(RuntimeError, match="exists already"), posing_as(0, 2):
            pass
        assert dist.get_world_size() == 4
    assert not dist.is_initialized()


def test_kernels_keep_what_a_gpu_keeps() -> None:
    """A norm its input and an fp32 number per row; attention its inputs, output and log-sum-exp."""
    with fake_tensors(), TensorBytes() as memory:
        rows = torch.zeros(64, 256, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(256, dtype=torch.bfloat16, requires_grad=True)
        before = memory.live
        normed = F.rms_norm(rows, (256,), weight)
        assert memory.live - before == 64 * 256 * 2 + 64 * 4
        heads = [torch.zeros(1, number, 128, 64, dtype=torch.bfloat16, requires_grad=True) for number in (8, 2, 2)]
        before = memory.live
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        kept = memory.live - before
        assert 8 * 128 * 64 * 2 + 8 * 128 * 4 <= kept < 8 * 128 * 64 * 2 + 8 * 128 * 4 + 256  # and a random state
        (attended.sum() + normed.sum()).backward()
        assert heads[1].grad is not None and heads[1].grad.shape == heads[1].shape


# -- what is noted -----------------------------------------------------------------------------------


def test_every_collective_is_noted_with_its_bytes_ranks_and_name() -> None:
    log = CollectiveLog()
    with posing_as(1, 4), fake_tensors(), TensorBytes() as memory, log.naming():
        memory.observers.append(log)
        pair = dist.new_group([1, 3])
        part, whole = torch.zeros(8), torch.zeros(32)
        with named("forward 0"), sent("tp", "all-gather", part):
            all_gather(whole, part, dist.group.WORLD)
        reduce_scatter_sum(part, whole, dist.group.WORLD)
        dist.all_reduce(part, group=pair)
        dist.all_to_all_single(torch.zeros(6), torch.zeros(4), [1, 5], [2, 2], group=pair)
        with sent("pp", "send", part):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, part, 3), dist.P2POp(dist.irecv, torch.zeros(4), 0)])
        dist.broadcast(part, 0)
    everyone = (0, 1, 2, 3)
    found = [(one.kind, one.ranks, one.size_bytes, one.label.title, one.peer) for one in log.sent]
    assert found == [
        (CollectiveKind.ALL_GATHER, everyone, 128, "tp: all-gather", None),
        (CollectiveKind.REDUCE_SCATTER, everyone, 128, "", None),
        (CollectiveKind.ALL_REDUCE, (1, 3), 32, "", None),
        (CollectiveKind.ALL_TO_ALL, (1, 3), 16, "", None),
        (CollectiveKind.SEND_RECV, everyone, 32, "pp: send", 3),
        (RECEIVE, everyone, 16, "pp: send", 0),
        (CollectiveKind.BROADCAST, everyone, 32, "", None),
    ]


def test_functional_collectives_are_noted_too() -> None:
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

    log = CollectiveLog()
    with posing_as(0, 4), fake_tensors(), TensorBytes() as memory:
        memory.observers.append(log)
        all_reduce(torch.zeros(4), "sum", list(range(4)))
        all_gather_tensor(torch.zeros(4), 0, list(range(4)))
        reduce_scatter_tensor(torch.zeros(16), "sum", 0, list(range(4)))
    assert [(one.kind, one.size_bytes) for one in log.sent] == [
        (CollectiveKind.ALL_REDUCE, 16),
        (CollectiveKind.ALL_GATHER, 64),
        (CollectiveKind.REDUCE_SCATTER, 64),
    ]


def test_arithmetic_by_hand() -> None:
    log = FlopLog()
    with fake_tensors(), TensorBytes() as memory:
        memory.observers.append(log)
        rows, weight = torch.zeros(16, 32, requires_grad=True), torch.zeros(8, 32, requires_grad=True)
        F.linear(rows, weight).sum().backward()
        assert log.flops["products"] == 3 * 2 * 16 * 32 * 8
        heads = [torch.zeros(2, number, 64, 16, dtype=torch.bfloat16, requires_grad=True) for number in (4, 2, 2)]
        F.scaled_dot_product_attention(*heads, is_causal=True).sum().backward()
        assert log.flops["attention"] == 3 * 2 * 2 * 2 * 4 * 64 * 64 * 16 / 2


def test_parts_of_memory_by_where_tensors_are_made_and_freed() -> None:
    places = Places()
    with fake_tensors(), MemoryLog(places) as memory:
        weights = torch.zeros(100)
        memory.claim("weights", [weights])
        memory.forget()
        places.now = StepPlace("forward", part="layer")
        kept, passing = torch.zeros(10), torch.zeros(1000)
        del passing
        places.now = StepPlace("backward", part="layer")
        del kept
        gradient = torch.zeros(100)
        places.passes += 1
        places.now = StepPlace("update")
        del gradient
    (peaks,) = at_one_moment([memory.moments()])
    forward = {part: size for part, size in peaks[StepPlace("forward", part="layer")].items() if size}
    assert forward == {"weights": 400, "activations": 40, "temporary": 4000}
    backward = {part: size for part, size in peaks[StepPlace("backward", part="layer")].items() if size}
    assert backward == {"weights": 400, "gradients": 400}
    assert [(one.part, one.bytes, one.number) for one in memory.holders()] == [
        ("temporary", 4000, 1),
        ("weights", 400, 1),
        ("activations", 40, 1),
    ]


# -- extension ---------------------------------------------------------------------------------------

DENSE, EXPERTS = (0, LayerKind()), (0, LayerKind(LayerRecord(feed_forward="mixture")))


def test_numbers_that_grow_with_layers_and_microbatches_are_extended_exactly() -> None:
    def numbers(shape: TracedShape) -> dict[object, float]:
        m = shape.microbatches
        return {"calls": 7 + 3 * m + shape.of(DENSE) * (2 + 5 * m) + shape.of(EXPERTS) * (1 + 11 * m), "once": 4.0}

    whole = TracedShape(((DENSE, 3), (EXPERTS, 58)), 100)
    plan = extension(whole, 4, (2, 3))
    assert plan.small == TracedShape(((DENSE, 3), (EXPERTS, 4)), 2)
    assert len(plan.shapes) == 4
    assert plan.extended(numbers) == numbers(whole)


def test_what_is_small_is_traced_as_it_is() -> None:
    whole = TracedShape(((DENSE, 4),), 3)
    plan = extension(whole, 4, (2, 3))
    assert plan.shapes == [whole]
    assert plan.extended(lambda shape: {"calls": 5.0}) == {"calls": 5.0}


def test_kinds_of_which_there_are_equally_many_grow_together() -> None:
    whole = TracedShape((((0, LayerKind()), 8), ((3, LayerKind()), 8), ((1, LayerKind()), 6)), 1)
    plan = extension(whole, 4, (2, 3))
    assert len(plan.shapes) == 3

    def numbers(shape: TracedShape) -> dict[object, float]:
        return {"bytes": sum((stage + 1) * number for (stage, _), number in shape.layers)}

    assert plan.extended(numbers) == numbers(whole)


def test_layers_and_microbatches_are_compared_from_the_nearer_end() -> None:
    small = TracedShape(((DENSE, 4),), 3)
    names = {
        of: [alike(StepPlace("backward", 0, "layer", LayerKind(), i, of), small, 3) for i in range(of)] for of in (4, 5)
    }
    assert [one and one.number for one in names[4]] == [0, 1, -2, -1]
    assert [one and one.number for one in names[5]] == [0, 1, None, -2, -1]
    assert set(names[4]) == {one for one in names[5] if one is not None}
    visits = [alike(StepPlace("forward", 0, "head", visit=visit), small, 5) for visit in range(5)]
    assert [one and one.visit for one in visits] == [0, 1, None, None, -1]
    assert alike(StepPlace("update"), small, 3) == StepPlace("update")


def test_parts_are_those_of_one_moment_in_all_traces() -> None:
    place = StepPlace("forward", part="head")
    small = {place: [{"weights": 5.0, "temporary": 6.0}, {"weights": 10.0, "temporary": 0.0}]}
    large = {place: [{"weights": 5.0, "temporary": 6.0}, {"weights": 20.0, "temporary": 0.0}]}
    assert [one[place]["weights"] for one in at_one_moment([small, large])] == [10.0, 20.0]
    shorter = {place: [{"weights": 5.0, "temporary": 6.0}]}
    assert [one[place]["weights"] for one in at_one_moment([shorter, large])] == [5.0, 20.0]


# -- comparison --------------------------------------------------------------------------------------


def test_a_pipeline_counts_what_crosses_its_busier_boundary() -> None:
    lines = {
        TracedCollective("pp", "send_recv", "pp: send", 4, 1): 10.0,
        TracedCollective("pp", RECEIVE, "", 4, 1): 10.0,
        TracedCollective("pp", "send_recv", "pp: send", 4, 3): 7.0,
        TracedCollective("cp", "send_recv", "cp: send", 4, 2): 5.0,
        TracedCollective("cp", RECEIVE, "cp: send", 4, 0): 5.0,
    }
    assert traced_bytes(job({"dp": 16}), lines) == {("pp", "send_recv"): 20.0, ("cp", "send_recv"): 5.0}


def test_an_exchange_in_levels_counts_what_leaves_the_rank() -> None:
    lines = {
        TracedCollective("ep", "all_to_all", "ep: dispatch", 2): 10.0,
        TracedCollective("ep", "all_to_all", "ep: dispatch", 8): 8.0,
    }
    levels = job({"dp": 16, "ep": 8, "dispatch": "deduplicated"}, model="tiny-moe")
    assert traced_bytes(levels, lines) == {("ep", "all_to_all"): 12.0}
    flat = job({"dp": 16, "ep": 8}, model="tiny-moe")
    assert traced_bytes(flat, lines) == {("ep", "all_to_all"): 18.0}


@pytest.mark.parametrize(
    ("planned", "traced", "defect"), [(100, 101, False), (100, 97, True), (0, 1, True), (0, 0, False)]
)
def test_more_than_two_percent_is_a_defect(planned: float, traced: float, defect: bool) -> None:
    assert Compared("bytes", planned, traced).defect == defect
    assert not Compared("bytes", planned, traced, negligible=True).defect


# -- requests ----------------------------------------------------------------------------------------


def test_data_parallelism_takes_what_is_left_of_a_world() -> None:
    larger = resized(job({"tp": 4, "pp": 2}, global_batch=2048), 1024)
    assert (larger.strategy.dp, larger.strategy.world, larger.cluster.devices) == (128, 1024, 1024)


@pytest.mark.parametrize(
    ("world", "says"),
    [(12, "use 8 or 16"), (4, "use 8"), (4096, "strategy.*batch|global_batch")],
)
def test_a_world_that_does_not_divide_is_refused_in_one_line(world: int, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        resized(job({"tp": 4, "pp": 2}, global_batch=64), world)
    assert "\n" not in str(caught.value)


def test_the_fullest_rank_is_asked_unless_another_is_named() -> None:
    wide = job({"tp": 2, "pp": 4, "dp": 2}, global_batch=64, model="tiny")
    rank = fullest_rank(wide)
    assert coordinates(wide.strategy, rank) == {"tp": 0, "cp": 0, "dp": 0, "pp": rank // 4}
    assert coordinates(wide.strategy, 13) == {"tp": 1, "cp": 0, "dp": 0, "pp": 3}
    with pytest.raises(SpecError, match="not one of the job's 16 ranks"):
        check_rank(wide, 16)
    assert coordinates(replace(wide.strategy, order=("pp", "dp", "cp", "tp")), 1)["pp"] == 1

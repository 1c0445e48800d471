"""Names of a profile: what is written is what is read, and what they are called makes no difference."""

from __future__ import annotations

from shardwise.collectives import CollectiveKind
from shardwise.engine import labels
from shardwise.engine.labels import (
    PASS_KINDS,
    Called,
    StepPhase,
    backend_kind,
    backend_operation,
    begin_name,
    in_backward,
    label_of,
    layer_name,
    message_sent,
    pass_name,
    sorting_name,
    stage_input_gradient,
    stage_output,
    step_name,
    wait_name,
)
from tables import table

CALLED = {name: value for name, value in vars(Called).items() if name.isupper()}
PHASES = {name: value for name, value in vars(StepPhase).items() if name.isupper()}


def test_steps_layers_and_passes_come_back() -> None:
    for number in (0, 7, 1234):
        step, layer = label_of(step_name(number)), label_of(layer_name(number))
        assert (step.kind, step.number, layer.kind, layer.number) == ("step", number, "layer", number)
        for kind in PASS_KINDS:
            for stage in (None, 0, 31):
                found = label_of(pass_name(kind, number, stage))
                assert (found.kind, found.part) == ("pass", "compute")
                assert (found.pass_kind, found.number, found.stage) == (kind, number, stage)


@table("what", CALLED.values())
@table("dimension", ["tp", "cp", "ep", "expert_tp", "pp", "dp", "world"])
def test_collectives_come_back(dimension: str, what: str) -> None:
    for called in (what, in_backward(what)):
        begun, waited = label_of(begin_name(dimension, called, 4096)), label_of(wait_name(dimension, called))
        assert (begun.kind, begun.dimension, begun.what, begun.bytes) == ("begin", dimension, called, 4096)
        assert (waited.kind, waited.dimension, waited.what) == ("wait", dimension, called)
        assert begun.part == waited.part == ("ep" if dimension == "expert_tp" else dimension)
        assert begun.collective == labels._PRICED_AS.get(what) and not begun.message
        assert begun.over_the_batch == (called == Called.OVER_THE_BATCH)
        assert begun.title == f"{dimension}: {called}"


@table("message", [stage_output(3), stage_input_gradient(12)])
def test_a_message_is_what_its_receiver_waits_for(message: str) -> None:
    sent, waited = label_of(begin_name("pp", message_sent(message), 8)), label_of(wait_name("pp", message))
    assert sent.message == waited.what == message
    assert sent.what != waited.what  # a rank may send and receive the same
    assert sent.collective is CollectiveKind.SEND_RECV


def test_phases_come_back() -> None:
    assert {label_of(one).kind for one in PHASES.values()} == {"phase"}
    parts = {name: label_of(one).part for name, one in PHASES.items()}
    assert parts == {
        "DATA": "data",
        "OPTIMIZER": "optimizer",
        "OFFLOADED_STATES": "optimizer",
        "LAST_SUMS": "optimizer",
        "GRADIENT_NORM": "optimizer",
        "CHECKPOINT": "checkpoint",
        "EVALUATION": "evaluation",
    }
    sorting = label_of(sorting_name("expert_tp", Called.COMBINE))
    assert (sorting.kind, sorting.part, sorting.dimension) == ("phase", "compute", "expert_tp")


def test_names_are_told_apart() -> None:
    names = [*CALLED.values(), *PHASES.values()]
    assert len(set(names)) == len(names)
    assert labels._PRICED_AS.keys() <= set(CALLED.values())


def test_names_of_others() -> None:
    assert label_of("gloo:send").ends_when_waited and label_of("gloo:recv").kind == "backend"
    assert not label_of("gloo:all_reduce").ends_when_waited
    assert label_of("ncclDevKernel_AllReduce").communicates and label_of("ncclDevKernel_AllReduce").kind == "none"
    assert label_of("nccl:all_reduce").kind == "backend"
    assert label_of("FSDP::all_gather_copy_out").part == "dp" and label_of("FSDP::root_pre_forward").part == "compute"
    assert label_of("PP:0SEND_F1").part == "pp" and label_of("PP:0F1").part == "compute"
    assert label_of("forward_kernel").kind == label_of("gemm").kind == "none"
    assert backend_operation("gloo:all_reduce of 2") == "all_reduce"
    assert backend_kind("_reduce_scatter_base") is CollectiveKind.REDUCE_SCATTER
    assert backend_kind("all_reduce") is CollectiveKind.ALL_REDUCE and backend_kind("barrier") is None

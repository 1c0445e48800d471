"""Words are for people: to reword every description moves no price, no memory, no rank of a plan and no comparison, and
no code of the packages that decide reads a description."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cost.builders import GPT, LLAMA, MLA_MOE, MOE, job, switched
from shardwise.cost.analysis import analyze
from shardwise.cost.communication import step_traffic
from shardwise.cost.memory.activations import SavedRole
from shardwise.cost.memory.device import device_memories
from shardwise.cost.operators import OperatorRole
from shardwise.cost.payload import Payload, Phase, Role, Share
from shardwise.cost.prediction import predict
from shardwise.cost.simulation import simulated_step
from shardwise.cost.step_parts import COMMUNICATION, step_parts
from shardwise.layout.stages import rank_contents
from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec.job import Job
from shardwise.spec.model import MatrixRole
from shardwise.spec.stack import Stack

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardwise"
DESCRIPTIONS: tuple[type[Enum], ...] = (Role, Phase, Share, SavedRole, OperatorRole, MatrixRole)
HOST = {"host_link": {"bandwidth": 1e9, "latency": 1e-6}}


# -- rewording -------------------------------------------------------------------------------------------


def forget() -> None:
    """All that is remembered between two prices: what was computed with other words must not answer."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardwise."):
            for one in vars(module).values():
                if isinstance(one, functools._lru_cache_wrapper):
                    one.cache_clear()


@pytest.fixture
def reworded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Called, every description becomes the same word."""

    def reword() -> None:
        for descriptions in DESCRIPTIONS:
            for one in descriptions:
                monkeypatch.setattr(one, "_value_", "thing")
        forget()

    forget()
    yield reword
    monkeypatch.undo()
    forget()


def cases() -> dict[str, Job]:
    eager = Stack(elementwise="eager", tp_gradients="in turn", dummy_gradients=True)
    pieces = Stack(gated_activation="separate", latents="cut")
    return {
        "tensor": job(GPT, dp=2, tp=4, cluster=switched(8)),
        "async tensor": job(LLAMA, dp=2, tp=4, overlap={"tp": True}, cluster=switched(8)).unchecked(stack=eager),
        "context": job(LLAMA, dp=2, cp=4, recompute="full"),
        "pipeline": job(GPT, dp=2, pp=4, zero=1),
        "experts": job(MOE, dp=4, tp=2, ep=4, zero=3),
        "split experts": job(MOE, dp=2, tp=2, ep=2, expert_tp=2, sequence_parallel=False),
        "latent": job(MLA_MOE, dp=2, tp=2, recompute="selective").unchecked(stack=pieces),
        "offload": job(LLAMA, dp=4, zero=3, offload={"optimizer": 1, "activations": 0.5}, cluster=switched(4, **HOST)),
        "compressed": job(LLAMA, dp=4, compression={"method": "powersgd"}),
    }


def figures(case: Job) -> list[Any]:
    """All that is said of a job in figures."""
    ranks = range(case.strategy.pp)
    traffics = [one for rank in ranks for one in step_traffic(case, rank_contents(case, rank))]
    simulated, analysis = simulated_step(predict(case)), analyze(case)
    return [
        [(one.dimension, one.kind, one.in_pass, one.seconds, one.size_bytes, one.count) for one in traffics],
        predict(case).step_seconds,
        step_parts(simulated),
        [vars(memory) for memory in device_memories(case)],
        [
            (one.exposed_seconds, one.added_seconds)
            for name in COMMUNICATION
            for one in analysis.dimension_traffics(name)
        ],
    ]


@pytest.mark.parametrize("name", cases())
def test_rewording_moves_no_price_and_no_memory(name: str, reworded: Any) -> None:
    before = figures(cases()[name])
    reworded()
    assert {Payload(role, Phase.FORWARD).subject for role in Role} == {"thingthing"}
    assert figures(cases()[name]) == before


def test_rewording_moves_no_rank_of_a_plan(reworded: Any) -> None:
    def planned() -> list[Any]:
        request = Request(Job.from_dict({"model": "tiny", "cluster": "dgx-h100:1", "training": {"global_batch": 64}}))
        found = plan(request)
        assert isinstance(found, Plan)
        return [(one.job.strategy, one.step_seconds, one.memory.total) for one in found.candidates]

    before = planned()
    reworded()
    assert planned() == before


# -- searching -------------------------------------------------------------------------------------------

DECIDE = ("cost", "layout", "pipeline", "planner", "measure", "report")
_PARSING = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit"}
_FOR_PEOPLE = {"what", "words", "subject", "title"}
# Text that is not ours, or that a user typed: where it comes in.
FOREIGN_TEXT = {
    "cost/validation": "published tables",
    "planner/constraints.py": "options of the command line",
    "planner/what_if.py": "options of the command line",
    "measure/calibrate": "names of clusters and processors",
    "measure/deviation.py": "names of parameters",
    "measure/doctor": "the operating system's answers",
    "measure/dryrun/collectives.py": "names of PyTorch's operators",
    "measure/verify.py": "/proc/meminfo",
    "report/tables.py": "text that is folded to a width",
    "report/page.py": "text that is cut into lines",
    "report/collectives_picture.py": "a figure without its zeros",
}


def parsed_labels(source: str) -> list[str]:
    """Where a module takes text apart, or compares the words of a description."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method, owner = node.func.attr, node.func.value
            library = isinstance(owner, ast.Name) and owner.id in ("np", "torch", "numpy")
            regular = isinstance(owner, ast.Name) and owner.id == "re"
            if regular or (method in _PARSING and not library):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            described = any(isinstance(one, ast.Attribute) and one.attr in _FOR_PEOPLE for one in sides)
            if described and any(_has_text(one) for one in sides):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _has_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_has_text, node.elts))
    named = isinstance(node, ast.Name) and node.id.isupper()
    return named or isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_no_code_that_decides_takes_a_label_apart() -> None:
    found = {}
    for package in DECIDE:
        for path in sorted((SOURCE / package).rglob("*.py")):
            name = path.relative_to(SOURCE).as_posix()
            excused = any(name.startswith(foreign) for foreign in FOREIGN_TEXT)
            if not excused and (lines := parsed_labels(path.read_text(encoding="utf-8"))):
                found[name] = lines
    assert found == {}


def test_what_may_read_text_still_does() -> None:
    """A place that no longer reads text of others leaves the list."""
    for name in FOREIGN_TEXT:
        paths = [SOURCE / name] if name.endswith(".py") else sorted((SOURCE / name).rglob("*.py"))
        assert any(parsed_labels(path.read_text(encoding="utf-8")) for path in paths), name


@pytest.mark.parametrize(
    "source",
    [
        'traffic.what.endswith("forward")',
        'traffic.what in ("input gradients, backward", "saved inputs, backward")',
        "traffic.what in _NOT_DECOMPOSED".replace("_NOT_DECOMPOSED", "NOT_DECOMPOSED"),
        '"gradients" not in traffic.what',
        'name, _, stage = one.name.partition(" of stage ")',
        "re.fullmatch(pattern, name)",
        'line.what == "loss"',
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert parsed_labels(source)


@pytest.mark.parametrize(
    "source", ["traffic.payload.role is Role.LOSS", "np.split(array, 2)", 'f"{one.what}, hidden"', "one.what == what"]
)
def test_the_search_leaves_fields_alone(source: str) -> None:
    assert parsed_labels(source) == []

"""What the name of a range says: which part of a step it is, and of a collective its dimension and bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

DIMENSIONS = ("tp", "cp", "ep", "pp", "dp")
Kind = Literal["step", "begin", "wait", "layer", "backend", "phase", "none"]

_BEGIN = re.compile(r"(\w+): (.+) (\d+) B")
_WAIT = re.compile(r"(\w+): wait for (.+)")
_STEP = re.compile(r"step (\d+)")
_LAYER = re.compile(r"layer (\d+)")
# Names that others give, and those of our phases, by how they begin; the first that fits says the part.
_PHASES = (
    ("data", "data"),
    ("forward", "compute"),
    ("backward", "compute"),
    ("weight gradients", "compute"),
    ("optimizer", "optimizer"),
    ("gradients: ", "optimizer"),
    ("checkpoint", "checkpoint"),
    ("evaluation", "evaluation"),
    ("ep: ", "compute"),  # sorting tokens; what is sent has a name of its own
    ("expert_tp: ", "compute"),
    ("FSDP::all_gather_copy_out", "dp"),  # waits for the gather inside
    ("FSDP::post_backward_reduce", "dp"),
    ("FSDP::", "compute"),
)
_RUNTIME = re.compile(r"PP:\d+(SEND|RECV)?_?[FBIWU]")  # the pipelining runtime's own actions


@dataclass(frozen=True)
class Label:
    """``part`` is where the time of a range counts that no range inside takes; empty: where its surroundings count."""

    kind: Kind
    part: str = ""
    dimension: str = ""
    what: str = ""
    bytes: int = 0
    number: int = 0


@lru_cache(maxsize=4096)
def label_of(name: str) -> Label:
    """The part of a collective over all ranks is ``world``."""
    if name.startswith(("gloo:", "nccl:")):
        return Label("backend")
    if found := _STEP.fullmatch(name):
        return Label("step", "host", number=int(found[1]))
    if found := _LAYER.fullmatch(name):
        return Label("layer", "compute", number=int(found[1]))
    if found := _BEGIN.fullmatch(name):
        return Label("begin", _part(found[1]), found[1], found[2], int(found[3]))
    if found := _WAIT.fullmatch(name):
        return Label("wait", _part(found[1]), found[1], found[2])
    for start, part in _PHASES:
        if name.startswith(start):
            return Label("phase", part)
    if found := _RUNTIME.match(name):
        return Label("phase", "pp" if found[1] else "compute")
    return Label("none")


def _part(dimension: str) -> str:
    return "ep" if dimension == "expert_tp" else dimension

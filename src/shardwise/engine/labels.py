"""The names of ranges in a profile: written and read here and nowhere else.

A profiler identifies a range by one string. This module makes that string of what a range is (a step, a layer, a pass,
a collective) and turns it back into the fields of a `Label`, so that a reader of a profile parses nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwise.collectives import CollectiveKind

DIMENSIONS = ("tp", "cp", "ep", "pp", "dp")
Kind = Literal["step", "begin", "wait", "layer", "pass", "backend", "phase", "none"]
PassKind = Literal["forward", "backward", "weight gradients"]
PASS_KINDS: tuple[PassKind, ...] = ("forward", "backward", "weight gradients")


class Called:
    """The names of the engine's collectives in a profile; `_PRICED_AS` has the kind of each.

    They are plain strings, which a compiled layer takes as constants.
    """

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    GATHERED_PARTS = "send parts of an all-gather"
    SUMMED_PARTS = "send parts of a reduce-scatter"
    WHOLE_GRADIENTS = "all-reduce of whole parameters' gradients"
    LARGEST_LOGITS = "all-reduce of largest logits"
    EXPONENTIALS = "all-reduce of exponentials"
    DOCUMENTS = "all-gather documents"
    KEYS_AND_VALUES = "all-gather keys and values"
    KEY_VALUE_GRADIENTS = "reduce-scatter gradients of keys and values"
    HEADS = "all-to-all heads"
    PASSED_KEYS_AND_VALUES = "send keys and values"
    PASSED_GRADIENTS = "send gradients of keys and values"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    COUNTS = "counts"
    CHOICES = "choices"
    ROUTER_WEIGHTS = "weights"
    ROUTER_WEIGHT_GRADIENTS = "weight gradients"
    EXPERT_TOKENS = "expert tokens"
    EXPERT_OUTPUTS = "expert outputs"
    TOKEN_GRADIENTS = "token gradients"
    SEQUENCE_LOADS = "loads of sequences"
    STEP_LOADS = "loads of the step"
    LOSS = "broadcast of the loss"
    ALL_SENDS = "all sends"
    TIED_WEIGHT = "copy of the tied weight"
    TIED_GRADIENTS = "sum of the tied gradients"
    GRADIENTS = "all-reduce of gradients"
    LATE_GRADIENTS = "all-reduce of gradients, late"
    WORKERS_WEIGHTS = "all-reduce of workers' weights"
    FIRST_FACTORS = "all-reduce of first factors"
    SECOND_FACTORS = "all-reduce of second factors"
    GRADIENT_CODES = "all-to-all of compressed gradients"
    CODES_OF_SUMS = "all-gather of compressed gradients"
    GRADIENT_SHARDS = "reduce-scatter of gradients"
    PARAMETERS = "all-gather of parameters"
    LARGEST_WEIGHTS = "all-reduce of largest weights"
    MOMENTUM = "all-gather of Muon's momentum"
    GRADIENT_NORM = "sum of the gradients' norm"
    OVER_THE_BATCH = "sum over the batch"


class StepPhase:
    """The names of phases that are neither a pass nor a collective."""

    DATA = "data"
    OPTIMIZER = "optimizer"
    OFFLOADED_STATES = "optimizer: offloaded states"
    LAST_SUMS = "gradients: last sums"
    GRADIENT_NORM = "gradients: norm"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


# Collectives that have a price by themselves.
_OF_A_KIND = {
    CollectiveKind.ALL_REDUCE: (
        Called.ALL_REDUCE, Called.WHOLE_GRADIENTS, Called.LARGEST_LOGITS, Called.EXPONENTIALS, Called.TIED_GRADIENTS,
        Called.GRADIENTS, Called.LATE_GRADIENTS, Called.WORKERS_WEIGHTS, Called.FIRST_FACTORS, Called.SECOND_FACTORS,
        Called.GRADIENT_NORM, Called.OVER_THE_BATCH, Called.LARGEST_WEIGHTS,
    ),
    CollectiveKind.ALL_GATHER: (
        Called.ALL_GATHER, Called.DOCUMENTS, Called.KEYS_AND_VALUES, Called.CODES_OF_SUMS, Called.PARAMETERS,
        Called.MOMENTUM,
    ),
    CollectiveKind.REDUCE_SCATTER: (Called.REDUCE_SCATTER, Called.KEY_VALUE_GRADIENTS, Called.GRADIENT_SHARDS),
    CollectiveKind.ALL_TO_ALL: (Called.HEADS, Called.DISPATCH, Called.COMBINE, Called.GRADIENT_CODES),
    CollectiveKind.BROADCAST: (Called.LOSS,),
    CollectiveKind.SEND_RECV: (
        Called.PASSED_KEYS_AND_VALUES, Called.PASSED_GRADIENTS, Called.GATHERED_PARTS, Called.SUMMED_PARTS,
    ),
}  # fmt: skip
# Messages that together are a collective, decomposed so that matmuls run beside them.
_PART_OF = {Called.GATHERED_PARTS: CollectiveKind.ALL_GATHER, Called.SUMMED_PARTS: CollectiveKind.REDUCE_SCATTER}
_PRICED_AS = {called: kind for kind, several in _OF_A_KIND.items() for called in several}
# Where the time of a phase counts.
_PARTS = {
    StepPhase.DATA: "data",
    StepPhase.OPTIMIZER: "optimizer",
    StepPhase.CHECKPOINT: "checkpoint",
    StepPhase.EVALUATION: "evaluation",
}
# Phases that tell what the collectives inside are for.
_PURPOSES = {
    StepPhase.OFFLOADED_STATES: "optimizer",
    StepPhase.LAST_SUMS: "optimizer",
    StepPhase.GRADIENT_NORM: "optimizer",
}
WHOLE_PHASES = ("checkpoint", "evaluation")  # parts whose time is all theirs, whatever happens inside


@dataclass(frozen=True)
class Label:
    """What the name of a range says."""

    kind: Kind
    part: str = ""  # the part of a step that the range's own time counts to; empty: that of the range around it
    dimension: str = ""
    what: str = ""  # tells a collective (begin or wait) from others of its dimension; not interpreted further
    bytes: int = 0
    number: int = 0  # of a step, a layer, or the microbatch of a pass
    pass_kind: PassKind | None = None
    stage: int | None = None
    collective: CollectiveKind | None = None  # the kind of the collective, if it has a price of its own
    part_of: CollectiveKind | None = None  # the kind of collective that several such messages make up together
    message: str = ""  # what the receiver of a message between pipeline stages waits for
    over_the_batch: bool = False
    ends_when_waited: bool = False
    """A send or receive of gloo, whose range ends when it is waited for, not when it is done."""
    communicates: bool = False  # a kernel of a collective

    @property
    def title(self) -> str:
        """Dimension and collective, for people."""
        return f"{self.dimension}: {self.what}" if self.dimension else self.what


# -- written ---------------------------------------------------------------------------------------------


def step_name(number: int) -> str:
    return f"step {number}"


def layer_name(index: int | str) -> str:
    return f"layer {index}"


def pass_name(kind: PassKind, microbatch: int, stage: int | None = None) -> str:
    return f"{kind} {microbatch}" if stage is None else f"{kind} {microbatch} of stage {stage}"


def sorting_name(dimension: str, what: str) -> str:
    """Sorting and copying around an exchange of tokens."""
    return f"{dimension}: {what}"


def begin_name(dimension: str, what: str, size_bytes: int) -> str:
    """The start of a collective; ``what`` is one of `Called`, or made by one of the functions below."""
    return f"{dimension}: {what} {size_bytes} B"


def wait_name(dimension: str, what: str) -> str:
    return f"{dimension}: wait for {what}"


def in_backward(what: str) -> str:
    """The same collective, of gradients."""
    return f"{what}, backward"


def stage_output(stage: int) -> str:
    return f"stage {stage}'s output"


def stage_input_gradient(stage: int) -> str:
    return f"stage {stage}'s input gradient"


def message_sent(message: str) -> str:
    """The sender's name for it; its receiver waits for the ``message``."""
    return f"send {message}"


# -- read ------------------------------------------------------------------------------------------------

_BEGIN = re.compile(r"(\w+): (.+) (\d+) B")
_WAIT = re.compile(r"(\w+): wait for (.+)")
_STEP = re.compile(r"step (\d+)")
_LAYER = re.compile(r"layer (\d+)")
_PASS = re.compile(rf"({'|'.join(PASS_KINDS)}) (\d+)(?: of stage (\d+))?")
_MESSAGE = re.compile(r"send (stage \d+'s (?:output|input gradient))")
_BACKWARD = re.compile(r"(.+), backward")
_SORTING = re.compile(r"(ep|expert_tp): (.+)")
# Names given by PyTorch, by prefix; the first match gives the part.
_FOREIGN = (
    ("FSDP::all_gather_copy_out", "dp"),  # waits for the gather inside
    ("FSDP::post_backward_reduce", "dp"),
    ("FSDP::", "compute"),
)
_RUNTIME = re.compile(r"PP:\d+(SEND|RECV)?_?[FBIWU]")  # the pipelining runtime's own actions
_BACKENDS = ("gloo:", "nccl:")
# The kind of collective behind a backend's name: the first word found in it.
_BACKEND_KINDS = (
    ("gather", CollectiveKind.ALL_GATHER),
    ("reduce_scatter", CollectiveKind.REDUCE_SCATTER),
    ("reduce", CollectiveKind.ALL_REDUCE),
    ("to_all", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("send", CollectiveKind.SEND_RECV),
)


@lru_cache(maxsize=4096)
def label_of(name: str) -> Label:
    """The label of a range; collectives over all ranks count to the part ``world``."""
    if of_backend(name):
        return Label("backend", ends_when_waited=name in ("gloo:send", "gloo:recv"))
    if match := _STEP.fullmatch(name):
        return Label("step", "host", number=int(match[1]))
    if match := _LAYER.fullmatch(name):
        return Label("layer", "compute", number=int(match[1]))
    if match := _BEGIN.fullmatch(name):
        return _begun(match[1], match[2], int(match[3]))
    if match := _WAIT.fullmatch(name):
        return Label("wait", _part(match[1]), match[1], match[2])
    if match := _PASS.fullmatch(name):
        kind = next(kind for kind in PASS_KINDS if kind == match[1])
        stage = None if match[3] is None else int(match[3])
        return Label("pass", "compute", number=int(match[2]), pass_kind=kind, stage=stage)
    if name in _PARTS:
        return Label("phase", _PARTS[name])
    if name in _PURPOSES:
        return Label("phase", _PURPOSES[name], what=name)
    if match := _SORTING.fullmatch(name):  # what is sent has a name of its own
        return Label("phase", "compute", match[1], match[2])
    for start, part in _FOREIGN:
        if name.startswith(start):
            return Label("phase", part)
    if match := _RUNTIME.match(name):
        return Label("phase", "pp" if match[1] else "compute")
    return Label("none", communicates=name.startswith("nccl"))


def _begun(dimension: str, what: str, size_bytes: int) -> Label:
    part = _part(dimension)
    if message := _MESSAGE.fullmatch(what):
        return Label(
            "begin", part, dimension, what, size_bytes, collective=CollectiveKind.SEND_RECV, message=message[1]
        )
    gradients = _BACKWARD.fullmatch(what)
    collective = _PRICED_AS.get(gradients[1] if gradients else what)
    over_the_batch = what == Called.OVER_THE_BATCH
    return Label(
        "begin", part, dimension, what, size_bytes, collective=collective, part_of=_PART_OF.get(what),
        over_the_batch=over_the_batch,
    )  # fmt: skip


def _part(dimension: str) -> str:
    return "ep" if dimension == "expert_tp" else dimension


def of_backend(name: str) -> bool:
    """Whether the name comes from the backend."""
    return name.startswith(_BACKENDS)


def backend_operation(profiling_name: str) -> str:
    """The flight recorder's name of a collective, without the backend and what follows."""
    return profiling_name.partition(":")[2].partition(" ")[0]


@lru_cache(maxsize=256)
def backend_kind(operation: str) -> CollectiveKind | None:
    return next((kind for word, kind in _BACKEND_KINDS if word in operation), None)

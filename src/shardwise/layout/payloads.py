"""What ranks send each other in a step, and in which pass: the words that prices and runs share.

Decisions depend on the fields of a `Payload`, never on their words, which are for tables only.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")


class _Word(Enum):
    """Compared and hashed by identity, in a third of the time: prices are looked up by payloads."""

    __hash__ = object.__hash__


class Phase(_Word):
    """When it is sent, in words."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "forward and again backward"


class Share(_Word):
    """Which parameters or tokens it belongs to, as a prefix of the role's words."""

    DENSE = ""
    EXPERTS = "expert "


@unique
class Role(_Word):
    """What is sent, in words."""

    # tensor parallelism
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    OUTPUT_GRADIENTS = "output gradients"
    INPUT_GRADIENTS = "input gradients"
    SAVED_INPUTS = "saved inputs"
    SUMS_OF_SQUARES = "sums of squares"
    LATENTS = "latents"
    LATENT_GRADIENTS = "latent gradients"
    SAVED_LATENTS = "saved latents"
    NARROW = "narrow vectors of adapters"
    NARROW_GRADIENTS = "gradients of adapters' narrow vectors"
    UNSPLIT_GRADIENTS = "gradients of unsplit parameters"
    EMBEDDING = "embedding"
    EMBEDDING_GRADIENT = "embedding gradient"
    HEAD_INPUT = "head input"
    HEAD_INPUT_GRADIENT = "head input gradient"
    LOSS = "loss"
    TOKENS = "tokens"
    TOKEN_GRADIENTS = "token gradients"
    # context parallelism
    KEYS_AND_VALUES = "keys and values"
    KEYS_VALUES_AND_GRADIENTS = "keys, values and their gradients"
    HEADS = "q, k, v and output"
    THEIR_GRADIENTS = "their gradients"
    # expert parallelism
    DISPATCH = "dispatch"
    COMBINE = "combine"
    # pipeline parallelism
    ACTIVATIONS = "activations"
    TIED_GRADIENTS = "embedding gradients of both ends"
    # data parallelism; gradients are those of a pipeline's messages too
    GRADIENTS = "gradients"
    GRADIENT_SHARDS = "gradient shards"
    LATE_GRADIENTS = "late gradients"
    PARAMETERS = "parameters"
    WORKERS_WEIGHTS = "workers' weights"
    FIRST_FACTORS = "first factors"
    SECOND_FACTORS = "second factors"
    GRADIENT_CODES = "gradient codes"
    CODES_OF_SUMS = "codes of sums"
    # offload
    GRADIENTS_TO_HOST = "gradients to host"
    LAST_GRADIENTS_TO_HOST = "gradients to host, after the last microbatch"
    GRADIENTS_FROM_DISK = "gradients from disk"
    WEIGHTS_TO_HOST = "weights to host, for the update"
    WEIGHTS_FROM_HOST = "weights from host"
    UPDATED_WEIGHTS_FROM_HOST = "updated weights from host"
    FIRST_STATES_FROM_HOST = "first states from host, ahead of the update"
    STATES_FROM_HOST = "states from host, for the update"
    HEAD_STATES_FROM_HOST = "states of the head from host, for the update"
    STATES_TO_HOST = "updated states to host"
    STATES_FROM_DISK = "states from disk"
    STATES_TO_DISK = "states to disk"
    ACTIVATIONS_TO_HOST = "activations to host"
    ACTIVATIONS_FROM_HOST = "activations from host"


# How many come ahead of the update depends on where the chunks of a run end; together they are all states.
STATES_TO_DEVICE = frozenset({Role.FIRST_STATES_FROM_HOST, Role.STATES_FROM_HOST, Role.HEAD_STATES_FROM_HOST})

_NAME_NO_PASS = frozenset(
    {
        Role.UNSPLIT_GRADIENTS,
        Role.LOSS,
        Role.TIED_GRADIENTS,
        Role.GRADIENTS_TO_HOST,
        Role.LAST_GRADIENTS_TO_HOST,
        Role.GRADIENTS_FROM_DISK,
        Role.WEIGHTS_TO_HOST,
        Role.UPDATED_WEIGHTS_FROM_HOST,
        *STATES_TO_DEVICE,
        Role.STATES_TO_HOST,
        Role.STATES_FROM_DISK,
        Role.STATES_TO_DISK,
        Role.ACTIVATIONS_TO_HOST,
        Role.ACTIVATIONS_FROM_HOST,
    }
)


class Payload(NamedTuple):
    """Two traffics of a dimension with the same payload are parts of one."""

    role: Role
    phase: Phase
    share: Share = Share.DENSE

    @property
    def in_pass(self) -> Pass:
        """What is sent in both passes counts as backward, where most of it is exposed."""
        return "forward" if self.phase is Phase.FORWARD else "backward"

    @property
    def subject(self) -> str:
        """What is sent, in words."""
        return self.share.value + self.role.value

    @property
    def words(self) -> str:
        """The same with its pass."""
        return self.subject if self.role in _NAME_NO_PASS else f"{self.subject}, {self.phase.value}"

    def __str__(self) -> str:
        return self.words


def sent_forward(role: Role, share: Share = Share.DENSE) -> Payload:
    return Payload(role, Phase.FORWARD, share)


def sent_backward(role: Role, share: Share = Share.DENSE) -> Payload:
    return Payload(role, Phase.BACKWARD, share)

"""What a pass holds for a moment, where the stack makes gradients as they come: at the loss, and inside a layer.

The two never meet, so that the fuller of them counts. The terms are what this project's engine holds, operator by
operator; `shardwise dryrun` traces it and compares.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from shardwise.collectives.arrays import minimum, select
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.stack import Stack
from shardwise.spec.strategy import Strategy
from shardwise.spec.techniques import SPLIT_BACKWARD

# Either all parts of a rank's memory are added up, or they are at each of two moments.
Moment = Literal["together", "loss", "layer"]
TOGETHER: tuple[Moment, ...] = ("together",)
APART: tuple[Moment, ...] = ("loss", "layer")

LOGITS_AT_ONCE = 2**27  # models/loss.py


def moments_of(stack: Stack) -> tuple[Moment, ...]:
    return APART if stack.gradients == "made" else TOGETHER


def loss_moment_bytes(job: Job) -> float:
    """Logits of some tokens, the gradients of the head and of its input.

    The gradient of the weights is summed over the pieces in fp32, which `head_activation_bytes` has, and rounded at the
    end, when no logits are left. With tensor parallelism the whole head input is beside its gradient.
    """
    weights, tokens, element = head_weights(job), job.microbatch_tokens, job.training.recipe.activation
    rows = job.model.vocab / job.strategy.tp
    logits = min(tokens, max(1, LOGITS_AT_ONCE // rows)) * rows
    states = tokens * job.model.hidden * element
    narrow = element < 4
    if job.strategy.tp > 1:
        return max(element * weights, (4 + element * narrow) * logits) + 2 * states
    return max(element * weights, (4 + element) * logits) + states


def layer_moment_bytes(job: Job, kinds: tuple[bool, ...]) -> float:
    """The most that the backward pass of a layer makes beyond what it frees, of the kinds of layer that there are."""
    return max((_layer_bytes(job, moe) for moe in kinds), default=0.0)


def _layer_bytes(job: Job, moe: bool) -> float:
    model, strategy, element = job.model, job.strategy, job.training.recipe.activation
    tokens, tp = job.microbatch_tokens, job.strategy.tp
    region = tokens / tp if strategy.sequence_parallel else tokens
    # Gated: gradients of gate, up and activated gate, and the gate once more, when the input of the last product and
    # its gradient have been exchanged for each other.
    more = 4 if model.gated else 1
    wide, last_product = tokens * model.ffn / tp, model.ffn * model.hidden / tp
    if moe and model.moe:
        routed = tokens / tp * model.moe.top_k
        shared = more * tokens * model.moe.shared_ffn / tp
        wide = max(routed * model.moe.ffn, 2 * routed * model.hidden / more, shared / more)
        held = model.moe.experts / strategy.ep / strategy.expert_tensor_parallel
        last_product = model.moe.ffn * model.hidden * held
    gathered = 2 * tokens * model.hidden - tokens * model.ffn / tp if tp > 1 and not moe else 0.0
    made = max(more * wide, gathered) + region * model.hidden
    return element * made + job.training.recipe.gradient * last_product


class Absent(NamedTuple):
    """Gradients that are not there when most else is, before a first microbatch has gone back.

    ``whole``: ZeRO reduces those of a single microbatch layer by layer: they are never all there. ``growing``: they
    grow as the activations of a microbatch shrink, and the fuller end counts; replicas without ZeRO keep the memory
    that they are summed in. The gradient of the head is there after a first loss.
    """

    whole: Any
    growing: Any

    def not_yet(self, late: Any, of_a_microbatch: Any) -> Any:
        """Bytes of what grows while the activations of a microbatch go: of gradients, and ``late`` ones, of a layer
        that is brought back when layers behind it, which are not recomputed, have gone."""
        return minimum(self.growing + late, of_a_microbatch)


NOTHING_ABSENT = Absent(0.0, 0.0)


def gradients_absent(gradients: Any, zero: Any, strategy: Strategy, in_turn: bool) -> Absent:
    """``strategy`` for its degrees alone; layers are reduced ``in_turn`` while the only backward pass goes."""
    divided, alone = zero >= 1, strategy.gradient_group == 1
    kept = gradients * (zero == 0) * alone
    if in_turn:
        return Absent(gradients * divided, kept)
    return Absent(0.0 * gradients, gradients * divided + kept)


def reduces_in_turn(pp: int, schedule: str, microbatches: Any) -> Any:
    """A schedule that makes weight gradients later reduces them later, all at once."""
    return (microbatches == 1) & (pp == 1 or schedule not in SPLIT_BACKWARD)


def head_share(contents: RankContents, *, tied: bool) -> Any:
    """Of a rank's gradients those of the head, which a backward pass makes first."""
    ends = contents.others / contents.total
    return ends * contents.has_head / select(contents.has_embedding * (not tied), 2, 1)


def head_weights(job: Job) -> float:
    """Of the output projection, on one device."""
    return job.model.vocab * job.model.hidden / job.strategy.tp

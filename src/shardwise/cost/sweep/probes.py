"""What the parts of a model are asked with: ranks that hold nothing but one part, and jobs of one microbatch."""

from __future__ import annotations

from shardwise.cost.memory.activations import embedding_activation_bytes, head_activation_bytes, layer_activation_bytes
from shardwise.cost.step.stage_time import part_seconds
from shardwise.cost.sweep.group import LayerChoice
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

MODES = ("none", "selective", "full")
KINDS = ((), (False,), (True,), (False, True))  # of layer that a rank may have: dense, mixture of experts
# A rank with one part: dense layer, mixture-of-experts layer, embedding, head.
PROBES = (
    RankContents(0, 1, 0, False, False, 0.0, 0.0, 0.0),
    RankContents(0, 0, 1, False, False, 0.0, 0.0, 0.0),
    RankContents(0, 0, 0, True, False, 0.0, 0.0, 0.0),
    RankContents(0, 0, 0, False, True, 0.0, 0.0, 0.0),
)
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, ATTENTION_FORWARD, ATTENTION_BACKWARD, SAVED = range(6)


class Probes:
    """The job of one microbatch with a layer choice, under each recompute mode; made when asked for."""

    def __init__(self, job: Job, base: Strategy, layer: LayerChoice) -> None:
        self._job, self._base, self._layer = job, base, layer
        self._made: dict[str, Job] = {}

    def __getitem__(self, mode: str) -> Job:
        if mode not in self._made:
            strategy = self._base.unchecked(
                sequence_parallel=self._layer.sequence_parallel,
                context_method=self._layer.context_method,
                microbatch=self._layer.microbatch,
                recompute=mode,
                stage_layers="balanced",
            )
            training = self._job.training.unchecked(global_batch=strategy.data_parallel * strategy.microbatch)
            self._made[mode] = self._job.unchecked(strategy=strategy, training=training)
        return self._made[mode]


def probed_seconds(job: Job, probe: RankContents) -> tuple[float, ...]:
    seconds = part_seconds(job, probe)
    return (
        seconds.forward,
        seconds.input_gradient,
        seconds.weight_gradient,
        seconds.attention.forward,
        seconds.attention.backward,
    )


def probed_saved_bytes(job: Job, probe: RankContents) -> tuple[float, ...]:
    if probe.has_embedding:
        return (embedding_activation_bytes(job),)
    if probe.has_head:
        return (head_activation_bytes(job),)
    return (layer_activation_bytes(job, moe=probe.moe_layers > 0),)

"""The operators of a rank's layers on a roofline: FLOPs, bytes moved and seconds of each forward pass.

Williams et al. 2009, "Roofline: an insightful visual performance model for multicore architectures", CACM 52(4).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.compute.operators import Operator, OperatorRole
from shardwise.cost.compute.roofline import product_bytes
from shardwise.cost.memory.activations import key_value_features
from shardwise.cost.step.stage_time import timed_operators
from shardwise.layout.stages import RankContents
from shardwise.spec.job import Job


@dataclass(frozen=True)
class OperatorPoint:
    """All operators of one role in a layer, for one microbatch; those without FLOPs are left out."""

    role: OperatorRole
    flops: float
    moved_bytes: float
    seconds: float

    @property
    def words(self) -> str:
        return self.role.value

    @property
    def flops_per_byte(self) -> float:
        return self.flops / self.moved_bytes

    @property
    def rate(self) -> float:
        """FLOP/s, as predicted."""
        return self.flops / self.seconds


def operator_points(job: Job, contents: RankContents) -> tuple[OperatorPoint, ...]:
    """The matmuls and the attention of a pipeline rank, in the order of a layer."""
    by_role: dict[OperatorRole, tuple[float, float, float]] = {}
    for operator, seconds in timed_operators(job, contents):
        if operator.kind == "traffic":
            continue
        flops, moved, took = by_role.get(operator.role, (0.0, 0.0, 0.0))
        flops += float(operator.flops * operator.attended)
        by_role[operator.role] = flops, moved + _moved_bytes(job, operator), took + float(seconds.forward)
    return tuple(OperatorPoint(role, *figures) for role, figures in by_role.items())


def _moved_bytes(job: Job, operator: Operator) -> float:
    """Operands and results once each; of attention queries, keys, values and output (Dao et al. 2022, section 3.2)."""
    element = job.training.recipe.activation
    if operator.kind == "product":
        return float(product_bytes(operator, element))
    keys_and_values = job.microbatch_tokens * job.strategy.cp * key_value_features(job)
    return float(element * (operator.rows * operator.inner + keys_and_values))

"""How the weights move: constants of the optimizer that change no memory and no time."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.spec.codec import Spec, count


@dataclass(frozen=True, kw_only=True)
class LossScaling(Spec):
    """How an fp16 loss is made larger: ``static`` for ever, or from ``initial`` on, found by trial.

    The scale doubles after ``window`` good steps in a row and halves, never below ``minimum``, when ``hysteresis``
    bad ones have come since it last changed (Megatron-LM and DeepSpeed count alike).
    """

    initial: float = field(default=2.0**16, metadata={"above": 0})
    window: int = count(1000)
    hysteresis: int = count(2)
    minimum: float = field(default=1.0, metadata={"above": 0})
    static: float | None = field(default=None, metadata={"above": 0})


@dataclass(frozen=True, kw_only=True)
class Optimization(Spec):
    """``clip_norm`` limits the norm of the whole gradient (null: no limit); ``decay`` spares norms and biases.

    ``momentum`` is that of SGD and Muon. The defaults are those of the large open models (Llama, OLMo).
    """

    learning_rate: float = field(default=3e-4, metadata={"above": 0})
    decay: float = field(default=0.1, metadata={"minimum": 0})
    beta1: float = field(default=0.9, metadata={"minimum": 0, "maximum": 1})
    beta2: float = field(default=0.95, metadata={"minimum": 0, "maximum": 1})
    epsilon: float = field(default=1e-8, metadata={"above": 0})
    momentum: float = field(default=0.95, metadata={"minimum": 0, "maximum": 1})
    clip_norm: float | None = field(default=1.0, metadata={"above": 0})
    loss_scaling: LossScaling = LossScaling()
    seed: int = count(0, minimum=0)

"""How to fine-tune a model: all weights, adapters, or adapters over a quantised base; the first that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from shardwise.planner.plan import Plan, plan
from shardwise.planner.request import Request
from shardwise.spec.errors import DoesNotFit
from shardwise.spec.fine_tuning import Adapters
from shardwise.spec.units import readable_bytes

Method = Literal["full", "lora", "qlora"]
METHODS: tuple[Method, ...] = get_args(Method)
WORDS: dict[Method, str] = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


@dataclass(frozen=True)
class TriedMethod:
    """What a search for one method came to."""

    method: Method
    plan: Plan | None
    least_bytes: float
    """Of a device, by the strategy that needs least."""

    def sentence(self, available_bytes: float) -> str:
        name = WORDS[self.method]
        if self.plan is not None:
            return f"{name} fits: {readable_bytes(self.plan.best.memory.total)} of {readable_bytes(available_bytes)}"
        needs, there = readable_bytes(self.least_bytes), readable_bytes(available_bytes)
        return f"{name} needs at least {needs} of a device's {there}"


@dataclass(frozen=True)
class ChosenMethod:
    """The method, its plan, and why those before it were passed over."""

    method: Method
    plan: Plan
    tried: tuple[TriedMethod, ...]

    def sentence(self) -> str:
        """The reason in one line."""
        room = self.plan.request.room.usable_bytes
        return "; ".join(tried.sentence(room) for tried in self.tried)


def choose_method(
    request: Request,
    adapters: Adapters | None = None,
    *,
    methods: tuple[Method, ...] = METHODS,
    progress: Callable[[Method, int], None] | None = None,
) -> ChosenMethod:
    """The first of ``methods`` that fits without offload, else with it; raises DoesNotFit if none does.

    Full fine-tuning comes first: it can learn whatever the others can, and takes no more time to set up.
    """
    tried: list[TriedMethod] = []
    moving = (None,) if request.offload is None else (request.offload,)
    for offload in (False, *moving) if request.offload is None else moving:
        for method in methods:
            asked = replace(tuned(request, method, adapters or Adapters()), offload=offload)
            searched = plan(asked, None if progress is None else lambda count, method=method: progress(method, count))  # type: ignore[misc]
            if isinstance(searched, Plan):
                tried.append(TriedMethod(method, searched, 0.0))
                return ChosenMethod(method, searched, tuple(tried))
            least = min(searched.least_of_degrees.values(), default=float("inf"))
            if offload is False:
                tried.append(TriedMethod(method, None, least))
    last = tried[-1] if tried else None
    there = readable_bytes(request.room.usable_bytes)
    needs = "more" if last is None else readable_bytes(last.least_bytes)
    problem = f"{request.job.model.name} does not fit: even {WORDS[methods[-1]]} needs {needs} of a device's {there}"
    raise DoesNotFit("cluster", problem, "use more or larger devices, or a shorter training.seq")


def tuned(request: Request, method: Method, adapters: Adapters) -> Request:
    """The request for one method."""
    fields: dict[str, Any] = {"adapters": None, "trained": (), "base_precision": "computed"}
    training = request.job.training
    if method == "qlora" and training.recipe.compute not in ("fp32", "bf16", "fp16"):  # which 4 bits are decoded to
        training = replace(training, precision="bf16")
    if method != "full":
        narrow = training.recipe.compute != "fp32"
        quantised = "nf4" if adapters.method == "dora" else "nf4-double"  # of which DoRA cannot measure rows alone
        base = quantised if method == "qlora" else ("bf16" if narrow else "computed")
        fields = {"adapters": adapters, "trained": (), "base_precision": base}
    return replace(request, job=replace(request.job, training=replace(training, **fields)))

"""The inputs of a whole run (tokens, price, failures), and the campaign of a job with them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from shardwise.api.quantities import amount
from shardwise.cost.analysis import analyze
from shardwise.cost.campaign import HOUR, Campaign, MemoryCopyCost, checkpoint_level, memory_copy_cost
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.training import Training
from shardwise.spec.units import readable_duration

# Assumed time from an interruption to training again. MegaScale (arXiv 2402.15627, section 6.3; from memory) needs less
# than ten minutes to find a fault and about as long again to repeat the lost steps.
RESTART_SECONDS = 600.0
_LEAST_GOODPUT = 0.01
_CURRENCY = "$"

EXAMPLES = {  # and what each keyword means
    "tokens": ("15T", "tokens of the whole run (default: the job's training.tokens)"),
    "price": ("2.5/h", "money per device-hour, in $ unless a currency is given: €2.5/h"),
    "mtbf": ("50700h", "device-hours per interruption; 50700h is what Llama 3 saw"),
    "checkpoint_seconds": ("30s", "how long a checkpoint stops training (default: by the cluster's shared storage)"),
    "restart_seconds": ("10min", "from an interruption to training again (default: 10min)"),
}
_PRICE = re.compile(
    r"\s*([$€£¥]?)\s*([^/\s]+)\s*(?:(?:/|per)\s*(?:(?:gpu|device)[\s-]*)?h(?:ours?)?)?\s*", re.IGNORECASE
)


@dataclass(frozen=True)
class CampaignArguments:
    """The whole run as a caller gives it: numbers, or text with units, as for the flags of the same names."""

    tokens: Any = None
    price: Any = None
    mtbf: Any = None
    checkpoint_seconds: Any = None
    restart_seconds: Any = None


@dataclass(frozen=True)
class Terms:
    """`CampaignArguments` as numbers; None where the job decides."""

    tokens: float
    price: float | None
    currency: str
    device_hours_per_interruption: float
    checkpoint_seconds: float | None
    restart_seconds: float


def terms_from(given: CampaignArguments, training: Training) -> Terms | None:
    """The arguments as numbers, or None if no number of tokens is given; raises SpecError for invalid values."""
    tokens = training.tokens if given.tokens is None else _amount("tokens", given.tokens, "count")
    if tokens is None:
        _refuse(given, ("price", "mtbf", "checkpoint_seconds", "restart_seconds"), "tokens")
        return None
    if given.mtbf is None:
        idle = ("restart_seconds",) if training.checkpoint_interval else ("checkpoint_seconds", "restart_seconds")
        _refuse(given, idle, "mtbf")
    checkpoint, restart = given.checkpoint_seconds, given.restart_seconds
    price, currency = (None, _CURRENCY) if given.price is None else _price(given.price)
    return Terms(
        float(tokens),
        price,
        currency,
        math.inf if given.mtbf is None else _device_hours(given.mtbf),
        None if checkpoint is None else _amount("checkpoint_seconds", checkpoint, "seconds", zero=True),
        RESTART_SECONDS if restart is None else _amount("restart_seconds", restart, "seconds", zero=True),
    )


def campaign_of(given: CampaignArguments, job: Job, predicted_seconds: float) -> Campaign | None:
    """The whole run of ``job`` at the predicted time of its step; None if no number of tokens is given."""
    terms = terms_from(given, job.training)
    if terms is None:
        return None
    step = predicted_seconds
    seconds, where = _checkpoint(terms, job)
    interval = job.training.checkpoint_interval
    copies = _copies(terms, job, step, seconds)
    if copies is not None:
        seconds, interval, where = copies.stall_seconds, copies.interval, "memory of two nodes"
    _check_that_it_ends(terms, step, seconds, job.cluster.devices)
    try:
        run = Campaign(
            tokens=terms.tokens,
            tokens_per_second=job.tokens_per_step / step,
            devices=job.cluster.devices,
            price_per_device_hour=terms.price,
            device_hours_per_interruption=terms.device_hours_per_interruption,
            checkpoint_seconds=seconds,
            restart_seconds=terms.restart_seconds,
            checkpoint_interval=interval,
            background_share=0.0 if copies is None else copies.disk_share,
            storage=where,
            currency=terms.currency,
        )
        if run.interval < step:  # checkpoints are saved between steps
            run = replace(run, checkpoint_interval=step)
    except SpecError as error:
        raise error.under("training") from None
    if run.goodput < _LEAST_GOODPUT:
        problem = f"only {run.goodput:.2g} of the time moves training forward: the run never finishes"
        best = (
            f"{readable_duration(run.best_interval)} is best" if math.isfinite(run.best_interval) else "save less often"
        )
        raise SpecError("training.checkpoint_interval", problem, best)
    return run


def _checkpoint(terms: Terms, job: Job) -> tuple[float, str]:
    """How long a checkpoint stops training, and where it goes."""
    if terms.checkpoint_seconds is not None:
        return terms.checkpoint_seconds, "as given"
    fails = math.isfinite(terms.device_hours_per_interruption)
    if not fails and job.training.checkpoint_interval is None:
        return 0.0, ""  # nothing fails, nothing is saved
    level = checkpoint_level(analyze(job))
    if level is not None:
        return level.write_seconds, level.name
    if fails:
        problem = "needs the time of a checkpoint, and the cluster has no storage"
        raise SpecError("⟨mtbf⟩", problem, "give ⟨checkpoint_seconds=30s⟩")
    return 0.0, ""


def _copies(terms: Terms, job: Job, step_seconds: float, disk_seconds: float) -> MemoryCopyCost | None:
    """The cost of in-memory checkpoints, if the job asks for them and failures are counted.

    A given checkpoint time is that of a copy in memory.
    """
    if job.run.checkpoints.memory is None or math.isinf(terms.device_hours_per_interruption):
        return None
    given = terms.checkpoint_seconds
    return memory_copy_cost(analyze(job), step_seconds, disk_seconds if given is None else 0.0, given)


def _check_that_it_ends(terms: Terms, step_seconds: float, checkpoint_seconds: float, devices: int) -> None:
    between = terms.device_hours_per_interruption * HOUR / devices
    for name, what, seconds in (
        ("checkpoint_seconds", "a checkpoint", checkpoint_seconds),
        ("restart_seconds", "a restart", terms.restart_seconds),
        ("mtbf", "a step", step_seconds),
    ):
        if seconds >= between:
            problem = (
                f"{what} takes {readable_duration(seconds)}, and {devices:,} devices are interrupted every "
                f"{readable_duration(between)}: the run never finishes"
            )
            raise SpecError(f"⟨{name}⟩", problem, "give a shorter one, or a longer ⟨mtbf⟩")


def _refuse(given: CampaignArguments, names: tuple[str, ...], needed: str) -> None:
    for name in names:
        if getattr(given, name) is not None:
            remedy = f"give ⟨{needed}={EXAMPLES[needed][0]}⟩ too"
            raise SpecError(f"⟨{name}⟩", f"has no effect without ⟨{needed}⟩", remedy)


def _amount(name: str, text: Any, dimension: str, zero: bool = False) -> float:
    return amount(text, dimension, f"⟨{name}⟩", EXAMPLES[name][0], zero=zero)


def _price(text: Any) -> tuple[float, str]:
    match = _PRICE.fullmatch(str(text))
    if match is None:
        raise SpecError("⟨price⟩", f"{shown(text)} is not money per device-hour", "write it like 2.5/h")
    return _amount("price", match[2], "count"), match[1] or _CURRENCY


def _device_hours(text: Any) -> float:
    """Device-hours; a number without a unit is in hours."""
    return _amount("mtbf", f"{text}h" if str(text).strip()[-1:].isdigit() else text, "seconds") / HOUR

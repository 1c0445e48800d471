"""A whole training run: days, device hours, money, and what failures take of it.

Failures come at random with a mean time between them (exponential); what was computed since the last checkpoint is
lost, and the job restarts. The expected time is that of Daly 2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22(3), equation 20, for a run of many intervals:

    T = M · e^(R/M) · (e^((τ + δ)/M) − 1) · W / τ

W seconds of useful work, τ of it between checkpoints, δ to write one, R to restart, M between interruptions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.cost.analysis import Analysis
from shardwise.spec.errors import SpecError
from shardwise.spec.parameters import embedding_parameters, head_parameters
from shardwise.spec.training import OPTIMIZERS
from shardwise.spec.units import readable_duration

HOUR, DAY = 3600.0, 86400.0
# Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs.
LLAMA3_DEVICE_HOURS_PER_INTERRUPTION = 16_384 * 54 * 24 / 419
_LARGEST_EXPONENT = 600.0  # e^600 is still a number


def young_interval(checkpoint_seconds: float, between_interruptions: float) -> float:
    """√(2δM): Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9)."""
    return math.sqrt(2 * checkpoint_seconds * between_interruptions)


def daly_interval(checkpoint_seconds: float, between_interruptions: float) -> float:
    """Daly 2006, equation 37: √(2δM)·(1 + √(δ/2M)/3 + (δ/2M)/9) − δ, and M where writing takes 2M or more."""
    if checkpoint_seconds >= 2 * between_interruptions:
        return between_interruptions
    part = checkpoint_seconds / (2 * between_interruptions)
    first = young_interval(checkpoint_seconds, between_interruptions)
    return first * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint_seconds


def best_interval(checkpoint_seconds: float, between_interruptions: float) -> float:
    """The interval of least expected time: Daly's estimate, made exact.

    Infinite without failures; 0 if a checkpoint takes no time. The derivative of the expected time is 0 where
    1 − e^(−(τ + δ)/M) = τ/M; Newton's method finds it.
    """
    if math.isinf(between_interruptions):
        return math.inf
    if checkpoint_seconds == 0:
        return 0.0
    delta = checkpoint_seconds / between_interruptions
    if delta < 1e-20:
        return young_interval(checkpoint_seconds, between_interruptions)
    tau = daly_interval(checkpoint_seconds, between_interruptions) / between_interruptions
    for _ in range(50):
        slope = math.expm1(-(tau + delta))
        step = (-slope - tau) / slope
        tau -= step
        if abs(step) <= 1e-14 * tau:
            break
    return tau * between_interruptions


def slowdown(interval: float, checkpoint_seconds: float, restart_seconds: float, between_interruptions: float) -> float:
    """Expected seconds per second of useful work; raises SpecError if the run would not end."""
    if math.isinf(interval) and math.isinf(between_interruptions):
        return 1.0
    if math.isinf(between_interruptions):
        return 1.0 if checkpoint_seconds == 0 else 1 + checkpoint_seconds / interval
    span, restart = (interval + checkpoint_seconds) / between_interruptions, restart_seconds / between_interruptions
    if span + restart > _LARGEST_EXPONENT:
        raise SpecError(
            "checkpoint_interval",
            f"{readable_duration(interval + checkpoint_seconds + restart_seconds)} pass from a restart to the next "
            f"checkpoint, and {readable_duration(between_interruptions)} between interruptions: the run never finishes",
            "checkpoint more often, write or restart faster",
        )
    if interval == 0:  # and nothing to write
        return math.exp(restart)
    return max(1.0, math.exp(restart) * math.expm1(span) * between_interruptions / interval)  # 1 but for rounding


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A whole training run, with its checkpoints, interruptions and restarts; raises SpecError for absurd figures."""

    tokens: float
    tokens_per_second: float  # of all devices together, while nothing fails
    devices: int
    price_per_device_hour: float | None = None  # without it there is no `cost`
    device_hours_per_interruption: float = math.inf
    """Mean hours between unexpected interruptions of the whole job, times its devices; infinite: there are none."""
    checkpoint_seconds: float = 0.0  # how long writing a checkpoint stops training
    restart_seconds: float = 0.0
    checkpoint_interval: float | None = None
    """Seconds of training between two checkpoints; by default the interval with the shortest run."""
    background_share: float = 0.0
    """How much longer all training takes because of checkpoints that no failure goes back to, such as those on disk
    where copies in memory are used first."""
    storage: str = ""  # where checkpoints go, for people
    currency: str = "$"  # what the price is in, for people

    def __post_init__(self) -> None:
        positive = ("tokens", "tokens_per_second", "devices", "device_hours_per_interruption", "checkpoint_interval")
        endless = ("device_hours_per_interruption", "checkpoint_interval")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is None or name in ("storage", "currency"):
                continue
            if math.isnan(value) or (math.isinf(value) and name not in endless):
                raise SpecError(name, f"{value} is not a finite number", "correct it")
            if value < 0 or (value == 0 and name in positive):
                raise SpecError(name, f"{value} is not {'positive' if name in positive else '0 or more'}", "correct it")
        if not math.isfinite(self.useful_seconds * self.slowdown * self.devices) or self.useful_seconds <= 0:
            what = f"{self.tokens} at {self.tokens_per_second} tokens/s"
            raise SpecError("tokens", f"{what} is out of range", "check both")

    @property
    def between_interruptions(self) -> float:
        """Mean seconds between two interruptions of the whole job."""
        return self.device_hours_per_interruption * HOUR / self.devices

    @property
    def best_interval(self) -> float:
        """Seconds of training between checkpoints that make the run shortest."""
        return best_interval(self.checkpoint_seconds, self.between_interruptions) / (1 + self.background_share)

    @property
    def interval(self) -> float:
        """Seconds of training between checkpoints: as given, else the best."""
        return self.best_interval if self.checkpoint_interval is None else self.checkpoint_interval

    @cached_property
    def slowdown(self) -> float:
        """Expected seconds per second of useful work."""
        longer = 1 + self.background_share
        ends = (self.checkpoint_seconds, self.restart_seconds, self.between_interruptions)
        return longer * slowdown(self.interval * longer, *ends)

    @property
    def useful_seconds(self) -> float:
        """What the run would take if nothing failed and nothing were saved."""
        return self.tokens / self.tokens_per_second

    @property
    def seconds(self) -> float:
        """Expected seconds from the start to the last token."""
        return self.useful_seconds * self.slowdown

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def device_hours(self) -> float:
        return self.seconds / HOUR * self.devices

    @property
    def cost(self) -> float | None:
        """Money, in the currency of the price; None without a price."""
        return None if self.price_per_device_hour is None else self.device_hours * self.price_per_device_hour

    @property
    def interruptions(self) -> float:
        """Unexpected interruptions to be expected until the run is done, including those during restarts."""
        return self.seconds / self.between_interruptions

    @property
    def goodput(self) -> float:
        """Share of the time that moves training forward: 1 less checkpoints, lost work and restarts."""
        return 1 / self.slowdown

    @property
    def shares(self) -> Mapping[str, float]:
        """Shares of the time, adding up to 1: ``training``, ``checkpoints``, ``restarts`` and ``lost`` work.

        A restart lasts R, or until the next interruption, M·(1 − e^(−R/M)) on average; each interruption brings one.
        A checkpoint that an interruption breaks off counts as lost.
        """
        written = self.checkpoint_seconds / self.interval if self.checkpoint_seconds else 0.0
        written += self.background_share
        training, checkpoints = self.goodput, self.goodput * written
        restarts = -math.expm1(-self.restart_seconds / self.between_interruptions)
        lost = max(0.0, 1 - training - checkpoints - restarts)
        return {"training": training, "checkpoints": checkpoints, "restarts": restarts, "lost": lost}


TOKEN_BYTES = 4  # token ids above 65,535 need four bytes


@dataclass(frozen=True)
class StorageCost:
    """One storage level: the whole cluster's bandwidth, and what this job asks of it."""

    name: str
    bandwidth: float
    write_seconds: float
    read_seconds: float
    data_rate_share: float


def checkpoint_bytes(analysis: Analysis) -> float:
    """One checkpoint of all that is trained: weights in the recipe's format, master weights, optimizer states."""
    recipe, states = analysis.job.training.recipe, OPTIMIZERS[analysis.job.training.optimizer]
    model = analysis.job.model
    tuning = analysis.job.training.tuning
    ends = embedding_parameters(model) * tuning.trains("embedding") + head_parameters(model) * tuning.trains("head")
    matrices = analysis.trained_parameters - ends
    per_parameter = recipe.weight + recipe.master
    return analysis.trained_parameters * per_parameter + matrices * states.matrices + ends * states.others


def data_rate(analysis: Analysis) -> float:
    """Bytes of token ids that the run reads per second at its predicted step time."""
    return analysis.tokens_per_second * TOKEN_BYTES


def storage_costs(analysis: Analysis) -> list[StorageCost]:
    """Every storage level of the cluster: shared ones serve all nodes, of local ones each serves its node's part."""
    costs = []
    size = checkpoint_bytes(analysis)
    for storage in analysis.job.cluster.storage:
        read, write = (storage.bandwidth(analysis.job.cluster.nodes, out=out) for out in (False, True))
        to, back = (size / rate + storage.link.latency for rate in (write, read))
        costs.append(StorageCost(storage.name, read, to, back, data_rate(analysis) / read))
    return costs


def checkpoint_level(analysis: Analysis) -> StorageCost | None:
    """Where checkpoints go: the fastest storage that outlives a node; a node's own disks only if there is no other."""
    costs = storage_costs(analysis)
    shared = [cost for cost, storage in zip(costs, analysis.job.cluster.storage) if storage.shared]
    return min(shared or costs, key=lambda cost: cost.write_seconds, default=None)


@dataclass(frozen=True)
class MemoryCopyCost:
    """Copies of the state in the memory of two nodes, with checkpoints on disk besides."""

    interval: float  # seconds of training between two copies
    stall_seconds: float
    """How long a copy stops training: its way to the host, and the rest of its way to the other node if the next copy
    is due before it has arrived."""
    disk_share: float  # seconds of checkpoints on disk for each second of training


def memory_copy_cost(
    analysis: Analysis, step_seconds: float, disk_seconds: float, stall_seconds: float | None = None
) -> MemoryCopyCost | None:
    """What a job's copies in memory cost, or None if it keeps none; ``stall_seconds`` as measured, else by the links.

    A copy is kept on its own node and on the next, so an interruption that takes one node costs the work since the last
    copy; all interruptions are counted as such. A checkpoint of ``disk_seconds`` is written to disk as often as the run
    says.
    """
    run, cluster = analysis.job.run.checkpoints, analysis.job.cluster
    if run.memory is None:
        return None
    interval = run.memory * step_seconds
    on_disk = analysis.job.training.checkpoint_interval or (run.steps * step_seconds if run.steps else run.seconds)
    share = 0.0 if on_disk is None else disk_seconds / on_disk
    if stall_seconds is None:
        size, link, outer = checkpoint_bytes(analysis) / cluster.devices, cluster.host_link, cluster.levels[-1]
        # The state of a CPU is read and written in the same memory.
        rate = cluster.device.memory_bandwidth / 2 if link is None else link.bandwidth * link.efficiency
        between_nodes = outer.bandwidth_per_direction * outer.reached_share
        if outer.ports is not None:
            between_nodes *= outer.ports / cluster.node_devices
        travels = size / between_nodes if cluster.nodes > 1 else 0.0
        stall_seconds = size / rate + max(0.0, travels - interval)
    return MemoryCopyCost(interval, stall_seconds, share)

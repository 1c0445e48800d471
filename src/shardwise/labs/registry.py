"""The labs: what each asks, what it is given, and how it is run. Imports torch only when one runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from shardwise.launch.pool import Pool
from shardwise.spec.errors import SpecError, nearest_name, shown

if TYPE_CHECKING:
    from shardwise.labs.findings import LabReport

# What workers import, loaded once so that each starts quickly.
PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "shardwise.labs.ranks")


@dataclass(frozen=True)
class LabSetup:
    """What a lab is given."""

    pool: Pool
    """Runs functions on processes."""
    short: bool = False
    """Measures less of the same, for tests."""
    on_progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Lab:
    """A lab; the module of its name has ``run(setup)``."""

    name: str
    title: str
    asks: str
    """What one learns."""
    processes: int

    def run(self, setup: LabSetup) -> LabReport:
        module = import_module(f"shardwise.labs.{self.name.replace('-', '_')}")
        report: LabReport = module.run(setup)
        return report


LABS = (
    Lab("primitives", "The nine collectives", "what does each rank hold before and after?", 4),
    Lab("pipeline", "Pipeline bubbles", "how much of a step does each schedule wait?", 4),
    Lab("all-reduce", "All-reduce", "ring, tree or hierarchical, and how does a step hide it?", 4),
    Lab("zero", "DDP against ZeRO-1, 2 and 3", "what is kept, what is sent, and what does prefetch save?", 4),
    Lab("tensor", "Tensor and sequence parallelism by hand", "is it the engine's, to the rounding?", 4),
    Lab("experts", "Expert routing", "what do skewed tokens cost the busiest rank?", 4),
    Lab("ring-attention", "Ring attention", "what grows with the length, and what with its square?", 4),
    Lab("scaling", "Strong and weak scaling", "what is left of N times the speed?", 4),
    Lab("parameter-server", "Parameter server on Ray against all-reduce", "whose link is the bottleneck?", 3),
)


def lab_named(name: str) -> Lab:
    labs = {lab.name: lab for lab in LABS}
    if name not in labs:
        raise SpecError("lab", f"{shown(name)} is not a lab", nearest_name(name, labs) or "`shardwise lab` lists them")
    return labs[name]


@contextmanager
def own_setup(*, short: bool, on_progress: Callable[[str], None]) -> Iterator[LabSetup]:
    """A setup with processes of its own."""
    with Pool(PRELOAD) as pool:
        yield LabSetup(pool, short, on_progress)

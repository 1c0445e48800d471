"""Parameter servers: which weights each server keeps, and the bytes that cross its link."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.errors import SpecError


@dataclass(frozen=True)
class ServerPlan:
    """Weights in as many contiguous parts as there are servers."""

    workers: int
    servers: int
    elements: int
    """All weights."""
    gradient_bytes: float = 4
    """Of one element."""
    weight_bytes: float = 4
    """Of one element."""

    def __post_init__(self) -> None:
        for name in ("workers", "servers", "elements"):
            if getattr(self, name) < 1:
                raise SpecError(name, f"{getattr(self, name)} is too few", "use 1 or more")
        if self.servers > self.elements:
            raise SpecError("servers", f"{self.servers:,} for {self.elements:,} weights", "use fewer")

    def part(self, server: int) -> range:
        """The weights that a server keeps; sizes differ by one at most."""
        return range(self.elements * server // self.servers, self.elements * (server + 1) // self.servers)

    @property
    def largest_part(self) -> int:
        return max(len(self.part(server)) for server in range(self.servers))

    def received_bytes(self, server: int, steps: int) -> float:
        """Gradients of every worker in every step."""
        return self.workers * steps * len(self.part(server)) * self.gradient_bytes

    def sent_bytes(self, server: int, steps: int) -> float:
        """Weights to every worker, before the first step and after each."""
        return self.workers * (steps + 1) * len(self.part(server)) * self.weight_bytes

    @property
    def push_bytes(self) -> float:
        """Over the busiest link while all workers push: a server's, or a worker's where there are more servers."""
        return max(self.workers * self.largest_part, self.elements) * self.gradient_bytes

    @property
    def pull_bytes(self) -> float:
        return max(self.workers * self.largest_part, self.elements) * self.weight_bytes

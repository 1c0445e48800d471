"""Ports of InfiniBand and RoCE cards, as Linux shows them (Documentation/ABI/stable/sysfs-class-infiniband)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class InfinibandPort:
    """``name`` is like mlx5_0/1; ``state`` like ACTIVE or DOWN; ``rate`` like "400 Gb/sec (4X NDR)"."""

    name: str
    state: str
    physical: str
    rate: str
    layer: str

    @property
    def is_up(self) -> bool:
        return self.state == "ACTIVE"


def read_ports(folder: Path = SYSFS) -> list[InfinibandPort]:
    """All ports of all cards, in the order of their names; none where there are no cards."""
    return [
        InfinibandPort(
            f"{port.parent.parent.name}/{port.name}",
            _word(port / "state"), _word(port / "phys_state"), _text(port / "rate"), _text(port / "link_layer"),
        )
        for port in sorted(folder.glob("*/ports/*"))
    ]  # fmt: skip


def _word(path: Path) -> str:
    """ "4: ACTIVE" is ACTIVE."""
    return _text(path).rpartition(":")[2].strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "unknown"

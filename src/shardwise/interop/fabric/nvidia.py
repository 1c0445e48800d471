"""GPUs of one machine, as `nvidia-smi topo -m` and `nvidia-smi nvlink -s` print them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.spec.errors import SpecError, shown

# From the nearest to the farthest, in the words of nvidia-smi's own legend. NVLinks, NV1 to NV18, are before all of
# them; SOC is what old drivers call SYS.
PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_NVLINK = re.compile(r"NV(\d+)")
_DEVICE = re.compile(r"(?:GPU|NIC)\d+|mlx\d_\d+")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # the header is underlined, in a pipe too
_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"\s*Link (\d+):\s*(.+?)\s*$")


@dataclass(frozen=True)
class DeviceTopology:
    """How each two of a machine's GPUs and network cards are joined."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    paths: Mapping[tuple[str, str], str]

    def nvlinks(self, first: int, second: int) -> int:
        """NVLinks between two GPUs."""
        match = _NVLINK.fullmatch(self.paths[self.gpus[first], self.gpus[second]])
        return int(match[1]) if match else 0

    def distance(self, first: int, second: int) -> int:
        """Smaller is nearer: more NVLinks are nearer than fewer, and any are nearer than PCIe."""
        if first == second:
            return 0
        links, path = self.nvlinks(first, second), self.paths[self.gpus[first], self.gpus[second]]
        return 100 - links if links else 200 + PATHS.index(path)


def read_topology(text: str, field: str = "nvidia-smi topo -m") -> DeviceTopology:
    """The matrix; columns after the devices (affinities) are not part of it."""
    lines = [_STYLE.sub("", line) for line in text.splitlines()]
    heads = [(number, _DEVICE.findall(line)) for number, line in enumerate(lines) if _DEVICE.match(line.strip())]
    if not heads:
        raise SpecError(field, f"{shown(text)} has no GPUs", "give the output of `nvidia-smi topo -m`")
    first, devices = heads[0]
    paths: dict[tuple[str, str], str] = {}
    for line in lines[first + 1 :]:
        name, *cells = line.split()[: len(devices) + 1] or [""]
        if name not in devices:
            break
        for other, path in zip(devices, cells):
            if path != "X" and not _NVLINK.fullmatch(path) and path not in PATHS:
                raise SpecError(field, f"{name} and {other} are joined by {shown(path)}", "known: NV#, " + str(PATHS))
            paths[name, other] = path
    if len(paths) != len(devices) ** 2:
        raise SpecError(field, f"{len(paths)} entries of {len(devices)} devices", "give the whole output")
    gpus = tuple(device for device in devices if device.startswith("GPU"))
    return DeviceTopology(gpus, tuple(device for device in devices if device not in gpus), paths)


def read_nvlinks(text: str) -> dict[int, list[str]]:
    """By GPU the state of its NVLinks, in their order: a rate, or "<inactive>"."""
    speeds: dict[int, list[str]] = {}
    for line in text.splitlines():
        if gpu := _GPU.match(line):
            speeds[int(gpu[1])] = []
        elif speeds and (link := _LINK.fullmatch(line)):
            speeds[max(speeds)].append(link[2])
    return speeds

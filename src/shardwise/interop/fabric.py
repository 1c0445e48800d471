"""How machines are wired, as other tools say it: Slurm, labels of Kubernetes, nvidia-smi, InfiniBand's sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import IN_BULK, parse_json, read_text

# -- Node lists and task counts as Slurm writes them: `n[01-03,7],gpu-a` and `2(x3),1`

MOST_NODES = 100_000
_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def nodes_of(text: str, field: str = "node list") -> list[str]:
    """The names in their order: ``n[01-03,7],gpu-a`` is n01, n02, n03, n7 and gpu-a."""
    names = (name for item in _split(text, field) for name in _expanded(item, text, field))
    nodes = list(islice(names, MOST_NODES + 1))
    if not nodes:
        raise _wrong(text, field)
    if len(nodes) > MOST_NODES:
        raise _too_many(field)
    return nodes


def tasks_of_nodes(text: str, field: str = "tasks per node") -> list[int]:
    """The count of each node: ``2(x3),1`` is 2, 2, 2 and 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise SpecError(field, f"{shown(text)} does not count tasks", "written like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > MOST_NODES:
            raise _too_many(field)
    return counts


def _split(text: str, field: str) -> Iterator[str]:
    """At commas outside of brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _wrong(text, field)
        if letter == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    if depth:
        raise _wrong(text, field)
    yield text[begin:]


def _expanded(item: str, text: str, field: str) -> Iterator[str]:
    """All names of one item, which may have several brackets: ``r[1-2]n[1-2]``; the last one turns fastest."""
    parts = _PART.findall(item.strip())
    if not parts or "".join(parts) != item.strip():
        raise _wrong(text, field)
    choices, size = [], 1
    for part in parts:
        numbers = _numbers(part[1:-1], text, field) if part.startswith("[") else iter((part,))
        choices.append(list(islice(numbers, MOST_NODES + 1)))
        size *= len(choices[-1])
        if size > MOST_NODES:
            raise _too_many(field)
    yield from map("".join, product(*choices))


def _numbers(inside: str, text: str, field: str) -> Iterator[str]:
    """``01-03,7`` as 01, 02, 03 and 7: a number keeps the zeros of the range's first."""
    for item in inside.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _wrong(text, field)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MOST_NODES:
            raise _wrong(text, field)
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _too_many(field: str) -> SpecError:
    return SpecError(field, f"names more than {MOST_NODES:,} nodes", "give fewer")


def _wrong(text: str, field: str) -> SpecError:
    return SpecError(field, f"{shown(text)} is not a list of nodes", "written like n[01-03,7],gpu-a")


# -- Which switches are above which node: from a file of Slurm or Kubernetes, told apart by how it begins


def read_switches(path: Path, field: str) -> dict[str, tuple[str, ...]]:
    text = read_text(path, field, errors="replace")
    return read_kubernetes(text, field) if text.lstrip().startswith("{") else read_slurm(text, field)


def of_hosts(switches: dict[str, tuple[str, ...]], hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Those above some hosts; a name without its domain is the same host."""
    short = {name.partition(".")[0]: above for name, above in switches.items()}
    known = {host: switches.get(host) or short.get(host.partition(".")[0]) for host in hosts}
    return {host: above for host, above in known.items() if above}


# -- Switches as Slurm knows them: topology.conf, and what `scontrol show topology` prints
# Source: slurm.schedmd.com/topology.conf.html (plugins tree and block) and topology.html.

_SETTING = re.compile(r"(\w+)=(\S+)")
_MOST_NAMED = 10 * MOST_NODES  # each node by the switches above it
Switches = dict[str, tuple[str, ...]]


def read_slurm(text: str, field: str = "topology.conf") -> Switches:
    """By node the switches above it, the nearest first. Blocks are switches; aggregated ones are above them."""
    above: dict[str, str] = {}  # a switch above a switch
    leaf: dict[str, str] = {}  # the nearest switch of a node
    named = 0
    for line in text.splitlines():
        given = {name.lower(): value for name, value in _SETTING.findall(line.partition("#")[0])}
        name = given.get("switchname") or given.get("blockname")
        if given.get("aggregatedblock"):
            names, lower, upper = given["aggregatedblock"], above, given["aggregatedblock"]
        elif name is not None and "switches" in given:  # scontrol lists all nodes below it, too
            names, lower, upper = given["switches"], above, name
        elif name is not None and "nodes" in given:
            names, lower, upper = given["nodes"], leaf, name
        else:
            continue
        below = nodes_of(names, field)
        named += len(below)
        if named > _MOST_NAMED:
            raise SpecError(field, f"names nodes and switches more than {_MOST_NAMED:,} times", "give fewer")
        for member in below:
            lower.setdefault(member, upper)
    if not leaf:
        remedy = "give Slurm's topology.conf, or what `scontrol show topology` prints"
        raise SpecError(field, f"{shown(text)} names no switch with nodes", remedy)
    return {node: _chain(switch, above, field) for node, switch in leaf.items()}


def _chain(switch: str, above: dict[str, str], field: str) -> tuple[str, ...]:
    path = [switch]
    while (switch := above.get(switch, "")) and switch not in path:
        path.append(switch)
    if switch:
        raise SpecError(field, f"{switch} is above itself", "switches are a tree")
    return tuple(path)


# -- Switches as labels of Kubernetes nodes say it: what `kubectl get nodes -o json` prints
# Sources: docs.nvidia.com/topograph/reference/node-labels-and-annotations (0.x: network.topology.nvidia.com/...; 1.x:
# fabric.topograph.run/tier-N, tier 0 nearest; accelerator domains), GKE's cloud.google.com/gce-topology-...,
# kubernetes.io/docs/reference/labels-annotations-taints (zone and region).

# The nearest first. Of labels for the same thing, the first that a node has counts.
LABELS: tuple[tuple[str, ...], ...] = (
    ("nvidia.com/gpu.clique", "accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator"),
    (
        "fabric.topograph.run/tier-0", "network.topology.nvidia.com/leaf", "network.topology.nvidia.com/block",
        "cloud.google.com/gce-topology-subblock",
    ),
    ("fabric.topograph.run/tier-1", "network.topology.nvidia.com/spine", "cloud.google.com/gce-topology-block"),
    ("fabric.topograph.run/tier-2", "network.topology.nvidia.com/core", "network.topology.nvidia.com/datacenter"),
    ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"),
    ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"),
)  # fmt: skip


def read_kubernetes(text: str, field: str = "nodes") -> dict[str, tuple[str, ...]]:
    """By node the switches, zones and regions that it is in, the nearest first; tiers that no node has are left out."""
    try:
        items = parse_json(text, most_values=IN_BULK)["items"]
        labels = {node["metadata"]["name"]: node["metadata"].get("labels") or {} for node in items}
    except (ValueError, KeyError, TypeError):
        problem = f"{shown(text)} is not a list of nodes"
        raise SpecError(field, problem, "give what `kubectl get nodes -o json` prints") from None
    tiers = [tier for tier in LABELS if any(_value(tier, own) for own in labels.values())]
    if not tiers:
        raise SpecError(field, "no node has a label of its place", "topology.kubernetes.io/zone is the least")
    # A node without a label is in a place of its own there: nothing says that it is near to another.
    return {name: tuple(_value(tier, own) or f"of {name}" for tier in tiers) for name, own in labels.items()}


def _value(tier: tuple[str, ...], labels: Mapping[str, Any]) -> str:
    """A place is only the same where the label is."""
    return next((f"{name}={labels[name]}" for name in tier if labels.get(name)), "")


# -- GPUs of one machine, as `nvidia-smi topo -m` and `nvidia-smi nvlink -s` print them

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


# -- Ports of InfiniBand and RoCE cards, as Linux shows them (Documentation/ABI/stable/sysfs-class-infiniband)

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

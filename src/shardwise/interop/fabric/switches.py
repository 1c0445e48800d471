"""Which switches are above which node: from a file of Slurm or Kubernetes, told apart by how it begins."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwise.interop.fabric.kubernetes import read_kubernetes
from shardwise.interop.fabric.slurm import read_slurm
from shardwise.spec.files import read_text


def read_switches(path: Path, field: str) -> dict[str, tuple[str, ...]]:
    text = read_text(path, field, errors="replace")
    return read_kubernetes(text, field) if text.lstrip().startswith("{") else read_slurm(text, field)


def of_hosts(switches: dict[str, tuple[str, ...]], hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Those above some hosts; a name without its domain is the same host."""
    short = {name.partition(".")[0]: above for name, above in switches.items()}
    known = {host: switches.get(host) or short.get(host.partition(".")[0]) for host in hosts}
    return {host: above for host, above in known.items() if above}

"""All checks in order; a failing one does not stop the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator

from shardwise.measure.doctor.host import (
    Checked,
    Examination,
    check_clocks,
    check_disk,
    check_loopback,
    check_open_files,
    check_ports,
    check_shared_memory,
)

Check = Callable[[Examination], Checked | Iterable[Checked]]


def examine(request: Examination) -> Iterator[Checked]:
    """The results as they come, the slowest check last."""
    host: dict[str, Check] = {
        "loopback": check_loopback,
        "ports": check_ports,
        "shared memory": check_shared_memory,
        "open files": check_open_files,
        "clock": check_clocks,
        "disk": check_disk,
    }
    yield from _run(host, request)
    if importlib.util.find_spec("torch") is None:
        yield Checked("PyTorch", "fail", "is not installed", "pip install 'shardwise[train]'")
        return
    from shardwise.measure.doctor.software import check_all_reduce, check_devices, check_versions

    software = list(_run({"versions": check_versions, "device memory": check_devices}, request))
    yield from software
    if not any(found.status == "fail" for found in software):  # else it would fail for the same reason
        yield from _run({"all-reduce": check_all_reduce}, request)


def _run(checks: dict[str, Check], request: Examination) -> Iterator[Checked]:
    for name, check in checks.items():
        try:
            found = check(request)
            yield from [found] if isinstance(found, Checked) else found
        except (OSError, RuntimeError) as error:
            yield Checked(name, "fail", " ".join(str(error).split()))

"""What `make test` runs of the tests, and how long each may take.

Properties are searched with the same examples every time in `make test`, with other ones each time in `make test-all`.
How tests spend less of a processor: see `halves`, and the collector of garbage.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from durations import Durations

# No deadline: how long an example takes says more about what else this machine does.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("searching", deadline=None)
settings.load_profile("steady")

_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
if not any(Path(device).exists() for device in _GPUS) and "cuda" not in os.environ.get("SHARDWISE_REQUIRE", ""):
    collect_ignore_glob = ["*_gpu.py"]

pytest_plugins = ["pytester"]

gc.disable()  # what is imported and collected stays


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help="keep what quick tests take in durations.json")
    parser.addoption("--part", metavar="K/N", help="only part K of N of the files; all parts together are all tests")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):  # which would try more examples than the kept durations are of
        config.pluginmanager.register(Durations(write=config.getoption("--write-durations")), "shardwise-durations")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a grid marked ``quick(n)`` n cases, evenly spread over it, are not slow; of all files those of ``--part``."""
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        files = sorted({item.path for item in items})
        items[:] = [item for item in items if files.index(item.path) % parts == number - 1]
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            grids.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cases in grids.values():
        (number,) = cases[0].get_closest_marker("quick").args  # type: ignore[union-attr]
        kept = {position * len(cases) // number for position in range(number)}
        for position, item in enumerate(cases):
            if position not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What exists by now is not scanned again and again: a million objects, a twentieth of the time of all tests."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        from halves import quick_products

        quick_products()

"""Fixed jobs keep their figures; a change that is meant is recorded by `make golden` and read in its diff."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from cli.golden import FOLDER, JOBS, TOLERANCE, analysis


def differences(kept: Any, now: Any, path: str = "") -> Iterator[str]:
    """One line for every value that is not as it was."""
    if isinstance(kept, dict) and isinstance(now, dict):
        for key in kept | now:
            where = f"{path}.{key}".lstrip(".")
            if key not in now:
                yield f"{where}: gone, was {kept[key]}"
            elif key not in kept:
                yield f"{where}: new, {now[key]}"
            else:
                yield from differences(kept[key], now[key], where)
    elif isinstance(kept, list) and isinstance(now, list):
        if len(kept) != len(now):
            yield f"{path}: {len(now)} entries, were {len(kept)}"
        for index, (before, after) in enumerate(zip(kept, now)):
            yield from differences(before, after, f"{path}[{index}]")
    elif _is_number(kept) and _is_number(now):
        if not math.isclose(kept, now, rel_tol=TOLERANCE):
            change = f" ({now / kept - 1:+.3%})" if kept else ""
            yield f"{path}: {now}, was {kept}{change}"
    elif kept != now or type(kept) is not type(now):
        yield f"{path}: {now!r}, was {kept!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@pytest.mark.parametrize("name", JOBS)
def test_the_figures_are_the_kept_ones(name: str) -> None:
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    changed = list(differences(kept, analysis(name)))
    shown = "\n".join(changed[:40]) + (f"\n... and {len(changed) - 40} more" if len(changed) > 40 else "")
    assert not changed, f"{name} changed; if that is meant, run `make golden`:\n{shown}"


def test_every_golden_file_has_its_job() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(JOBS)


def test_a_difference_is_found_and_named() -> None:
    kept = {"a": [1.0, {"b": 2.0}], "fits": True, "gone": 1, "same": 1.0}
    now = {"a": [1.0, {"b": 2.1}], "fits": 1, "new": 2, "same": 1.0 + 1e-12}
    assert set(differences(kept, now)) == {
        "a[1].b: 2.1, was 2.0 (+5.000%)",
        "fits: 1, was True",
        "gone: gone, was 1",
        "new: new, 2",
    }
    assert list(differences([1], [1, 2])) == [": 2 entries, were 1"]

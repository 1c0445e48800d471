"""Versions of the data that `--json` prints, and what changed between them (docs/json.md is made from this).

A version grows when a key is renamed, removed or means something else; a new key does not change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FIRST = "as of 0.1.0"
# By verb: what each version changed; the last one is printed.
CHANGES: dict[str, tuple[str, ...]] = {
    "analyze": (FIRST, "parts, bottleneck, advice and scaling are of the predicted step, before of its floor"),
    "predict": (FIRST,),
    "plan": (FIRST,),
    "report": (FIRST,),
    "explain": (FIRST, "every figure is a number keyed by its unit, before text"),
    "export": (FIRST,),
    "verify": (FIRST,),
    "dryrun": (FIRST,),
    "train": (FIRST,),
    "train --on": (FIRST,),
    "status": (FIRST,),
    "compare": (FIRST,),
    "calibrate": (FIRST,),
    "validate": (FIRST,),
    "generate": (FIRST,),
    "convert": (FIRST,),
    "data build": (FIRST,),
    "checkpoint inspect": (FIRST,),
    "checkpoint reshard": (FIRST,),
    "doctor": (FIRST,),
    "bench step": (FIRST,),
    "bench parameter-server": (FIRST,),
    "lab": (FIRST,),
}


def versioned(verb: str, data: dict[str, Any]) -> dict[str, Any]:
    """The data of a verb as it is printed: its version as `format`, first."""
    return {"format": len(CHANGES[verb]), **data}


def formats_table() -> Iterator[str]:
    """The lines of the table in docs/json.md."""
    yield "| verb | `format` | what it changed |"
    yield "|---|---|---|"
    for verb, changes in CHANGES.items():
        for version, change in enumerate(changes, 1):
            yield f"| {f'`{verb}`' if version == 1 else ''} | {version} | {change} |"

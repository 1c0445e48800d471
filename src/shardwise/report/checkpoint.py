"""What `checkpoint inspect` shows."""

from __future__ import annotations

from typing import Any

from shardwise.report.console import table
from shardwise.report.page import Page
from shardwise.spec.units import readable_bytes, readable_count

_KINDS = {"weight": "weights", "buffer": "buffers"}


def contents_page(found: dict[str, Any], *, each_tensor: bool) -> Page:
    """Of what `training.checkpoint.manifest.contents_of` returns."""
    sizes, tensors = found["bytes"], found["tensors"]
    rows = [
        (_KINDS.get(kind, kind), f"{sum(one['kind'] == kind for one in tensors):,}", readable_bytes(size))
        for kind, size in sizes.items()
    ]
    rows.append(("all", f"{len(tensors):,}", readable_bytes(sum(sizes.values()))))
    tables = [table("", (found["path"], ""), _rows(found), numbers_from=2)]
    tables.append(table("Contents", ("", "tensors", "bytes"), rows))
    if each_tensor:
        cells = [
            (*(one[name] for name in ("kind", "name", "dtype")), " × ".join(map(str, one["shape"])),
             str(one["pieces"]), readable_bytes(one["bytes"]))
            for one in tensors
        ]  # fmt: skip
        columns = "kind", "tensor", "type", "shape", "pieces", "bytes"
        tables.append(table("Tensors", columns, cells, numbers_from=3))
    return Page(tuple(tables))


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    # Of the layout, without its defaults and degrees of 1.
    layout = [f"{name} {_value(value)}" for name, value in found["layout"].items() if value != 1 or name == "zero"]
    saved_under = ", ".join(layout) or ("one process" if found["numbers"] else "no layout: whole tensors")
    rows = [("step", f"{found['step']:,}"), ("model", found["model"]), ("saved under", saved_under)]
    if found["precision"]:
        rows.append(("precision", str(found["precision"])))
    files = found["files"]
    rows.append(("files", f"{len(files):,}, {readable_bytes(sum(files.values()))}"))
    numbers = dict(found["numbers"])
    if "optimizer_steps" in numbers:
        rows.append(("optimizer steps", readable_count(numbers.pop("optimizer_steps"))))
    if isinstance(scale := numbers.pop("loss_scale", None), dict):
        rows.append(("loss scale", ", ".join(f"{name} {value:g}" for name, value in scale.items())))
    if isinstance(data := numbers.pop("data", None), dict):
        rows.append(("data", _position(data)))
    if isinstance(losses := numbers.pop("losses", None), list) and losses:
        rows.append(("last loss", f"{losses[-1]:.4g}"))
    return rows


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(one)}" for name, one in value.items()) + "}"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _position(data: dict[str, Any]) -> str:
    words = [f"batch {data['batch']:,} is next"] if isinstance(data.get("batch"), int) else []
    if isinstance(data.get("sequences"), int):
        words.append(f"{data['sequences']:,} sequences each")
    if data.get("left_out"):
        words.append(f"{len(data['left_out']):,} left out")
    return ", ".join(words)

"""What `checkpoint inspect` shows."""

from __future__ import annotations

from typing import Any

from shardwise.report.console import table
from shardwise.report.page import Page
from shardwise.spec.units import readable_bytes, readable_count

_KINDS = {"weight": "weights", "buffer": "buffers"}


def contents_page(contents: dict[str, Any], *, each_tensor: bool) -> Page:
    """A page of what `run.checkpoint.manifest.contents_of` returns."""
    sizes, tensors = contents["bytes"], contents["tensors"]
    rows = [
        (_KINDS.get(kind, kind), f"{sum(tensor['kind'] == kind for tensor in tensors):,}", readable_bytes(size))
        for kind, size in sizes.items()
    ]
    rows.append(("all", f"{len(tensors):,}", readable_bytes(sum(sizes.values()))))
    tables = [table("", (contents["path"], ""), _rows(contents), numbers_from=2)]
    tables.append(table("Contents", ("", "tensors", "bytes"), rows))
    if each_tensor:
        cells = [
            (*(tensor[name] for name in ("kind", "name", "dtype")), " × ".join(map(str, tensor["shape"])),
             str(tensor["pieces"]), readable_bytes(tensor["bytes"]))
            for tensor in tensors
        ]  # fmt: skip
        columns = "kind", "tensor", "type", "shape", "pieces", "bytes"
        tables.append(table("Tensors", columns, cells, numbers_from=3))
    return Page(tuple(tables))


def _rows(contents: dict[str, Any]) -> list[tuple[str, str]]:
    # The layout without degrees of 1.
    layout = [f"{name} {_value(value)}" for name, value in contents["layout"].items() if value != 1 or name == "zero"]
    saved_under = ", ".join(layout) or ("one process" if contents["numbers"] else "no layout: whole tensors")
    rows = [("step", f"{contents['step']:,}"), ("model", contents["model"]), ("saved under", saved_under)]
    if contents["precision"]:
        rows.append(("precision", str(contents["precision"])))
    files = contents["files"]
    rows.append(("files", f"{len(files):,}, {readable_bytes(sum(files.values()))}"))
    numbers = dict(contents["numbers"])
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
        return "{" + ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items()) + "}"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _position(data: dict[str, Any]) -> str:
    words = [f"batch {data['batch']:,} is next"] if isinstance(data.get("batch"), int) else []
    if isinstance(data.get("sequences"), int):
        words.append(f"{data['sequences']:,} sequences each")
    if data.get("left_out"):
        words.append(f"{len(data['left_out']):,} left out")
    return ", ".join(words)

"""What `checkpoint inspect` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.report.console import table
from shardwise.report.page import Page
from shardwise.spec.units import readable_bytes, readable_count

if TYPE_CHECKING:
    from shardwise.training.checkpoint.manifest import Contents

_KINDS = {"weight": "weights", "buffer": "buffers"}


def contents_page(found: Contents, *, each_tensor: bool) -> Page:
    sizes = found.bytes_of_kinds()
    rows = [
        (_KINDS.get(kind, kind), f"{sum(one.kind == kind for one in found.tensors):,}", readable_bytes(size))
        for kind, size in sizes.items()
    ]
    rows.append(("all", f"{len(found.tensors):,}", readable_bytes(sum(sizes.values()))))
    tables = [table("", (found.path, ""), _rows(found), numbers_from=2)]
    tables.append(table("Contents", ("", "tensors", "bytes"), rows))
    if each_tensor:
        tensors = [
            (one.kind, one.name, one.dtype, " × ".join(map(str, one.shape)), str(one.pieces), readable_bytes(one.bytes))
            for one in found.tensors
        ]
        columns = "kind", "tensor", "type", "shape", "pieces", "bytes"
        tables.append(table("Tensors", columns, tensors, numbers_from=3))
    return Page(tuple(tables))


def contents_data(found: Contents, *, each_tensor: bool) -> dict[str, Any]:
    tensors = [{**vars(one), "shape": list(one.shape)} for one in found.tensors]
    return {
        "path": found.path,
        "step": found.step,
        "model": found.model,
        "layout": found.layout,
        "precision": found.precision,
        "numbers": found.numbers,
        "files": found.file_bytes,
        "tensors": tensors if each_tensor else len(tensors),
        "bytes": found.bytes_of_kinds(),
    }


def _rows(found: Contents) -> list[tuple[str, str]]:
    rows = [("step", f"{found.step:,}"), ("model", found.model), ("saved under", _layout(found))]
    if found.precision:
        rows.append(("precision", str(found.precision)))
    files = found.file_bytes
    rows.append(("files", f"{len(files):,}, {readable_bytes(sum(files.values()))}"))
    numbers = dict(found.numbers)
    if "optimizer_steps" in numbers:
        rows.append(("optimizer steps", readable_count(numbers.pop("optimizer_steps"))))
    if isinstance(scale := numbers.pop("loss_scale", None), dict):
        rows.append(("loss scale", ", ".join(f"{name} {value:g}" for name, value in scale.items())))
    if isinstance(data := numbers.pop("data", None), dict):
        rows.append(("data", _position(data)))
    if isinstance(losses := numbers.pop("losses", None), list) and losses:
        rows.append(("last loss", f"{losses[-1]:.4g}"))
    return rows


def _layout(found: Contents) -> str:
    """The strategy without its defaults and degrees of 1."""
    parts = [f"{name} {_value(value)}" for name, value in found.layout.items() if value != 1 or name == "zero"]
    return ", ".join(parts) or ("one process" if found.numbers else "no layout: whole tensors")


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

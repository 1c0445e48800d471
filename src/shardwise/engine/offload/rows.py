"""All elements of a rank's parameters in one row, in the order of the optimizer's groups: any share is a cut of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Row:
    """A parameter's local elements in the row of all: ``begin`` to ``begin + size``, of group ``group``."""

    parameter: nn.Parameter
    begin: int
    size: int
    group: int


def rows_of(groups: Sequence[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    begin = 0
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            assert local(parameter).is_contiguous(), "parts of it are written as parts of a row"
            size = local(parameter).numel()
            rows.append(Row(parameter, begin, size, number))
            begin += size
    return rows


def whole_rows(rows: Sequence[Row], share: float, most: int) -> int:
    """How many first elements are nearest to a share of all: whole parameters, ``most`` elements at the most."""
    wanted = share * sum(row.size for row in rows)
    ends = [0, *(row.begin + row.size for row in rows)]
    return min((end for end in ends if end <= most), key=lambda end: abs(end - wanted))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that data parallelism may have divided."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()

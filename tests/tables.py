"""Many small cases as one test: every row is tried, and those that fail are named together."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

_SHOWN = 20


def table(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test: starting and reporting a case takes longer than many a case does.

    For rows that need nothing of their own: a fixture is the same for all of them. Tables may stand above each other.
    """
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cells = [dict(zip(columns, (row,) if len(columns) == 1 else row, strict=True)) for row in rows]

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def every_row(**fixtures: Any) -> None:
            assert cells, "the table has no rows"
            failures = [(one, error) for one in cells if (error := _failure(check, {**fixtures, **one}))]
            if failures:
                told = "".join(f"\n{_named(one)}: {_told(error)}" for one, error in failures[:_SHOWN])
                more = f"\n... and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
                raise AssertionError(f"{len(failures)} of {len(cells)} rows fail:{told}{more}") from failures[0][1]

        signature = inspect.signature(check)
        assert set(columns) <= set(signature.parameters)
        left = [one for name, one in signature.parameters.items() if name not in columns]
        left = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in left]
        every_row.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        every_row.__name__, every_row.__doc__, every_row.__module__ = check.__name__, check.__doc__, check.__module__
        return every_row

    return decorate


def _failure(check: Callable[..., None], arguments: Mapping[str, Any]) -> BaseException | None:
    try:
        check(**arguments)
    except (Exception, pytest.fail.Exception) as error:
        return error
    return None


def _named(row: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={str(value) if isinstance(value, Path) else repr(value):.200}" for name, value in row.items()
    )


def _told(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or place.line} ({Path(place.filename).name}:{place.lineno})"

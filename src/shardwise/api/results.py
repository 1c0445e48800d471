"""What every result of the API offers: text, a notebook view, plain data, data frames."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from shardwise.report.console import versioned
from shardwise.report.page import Page
from shardwise.spec.errors import SpecError, nearest_name

Rows = Sequence[Mapping[str, Any]]
T = TypeVar("T")


class Figure(property, Generic[T]):
    """A property of a result that reads an attribute inside it, by its path; ``means`` is its docstring."""

    def __init__(self, path: str, means: str = "") -> None:
        super().__init__(attrgetter(path), doc=means)

    if TYPE_CHECKING:

        def __get__(self, result: Any, owner: type | None = None) -> T: ...  # type: ignore[override]


class Result(ABC):
    """The result of a verb. Seconds, bytes and shares are plain numbers; ``print`` shows it as the command does."""

    verb: ClassVar[str]
    """The command of that name prints the same."""

    @cached_property
    @abstractmethod
    def page(self) -> Page:
        """Its lines and tables, also as ``page.markdown()`` and ``page.csv()``."""

    @property
    def screen(self) -> Page:
        """What the command prints without ``--details``: one screen, where the page is longer."""
        return self.page

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """What `to_dict` returns, without the version."""

    def to_dict(self) -> dict[str, Any]:
        """The same as the command's ``--json``; ``format`` is its version."""
        return versioned(self.verb, self._data())

    def tables(self) -> Mapping[str, Rows]:
        """Its tables by name, as rows of plain data; `to_frame` takes the first by default."""
        return {name: rows for name, rows in self.to_dict().items() if isinstance(rows, list)}

    def to_frame(self, table: str | None = None) -> Any:
        """A pandas DataFrame of one of its tables; raises SpecError if pandas is not installed."""
        tables = self.tables()
        name = next(iter(tables)) if table is None else table
        if name not in tables:
            raise SpecError("table", f"there is no {name!r}", nearest_name(name, tables))
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            remedy = "pip install pandas, or use tables(), which needs nothing"
            raise SpecError("to_frame", "pandas is not installed", remedy) from None
        return pandas.DataFrame(list(tables[name]))

    def __str__(self) -> str:
        return self.screen.text()

    def _repr_html_(self) -> str:
        return self.page.html()

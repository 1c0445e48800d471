"""One test of many rows: all are tried, each that fails is named, and none is taken for granted."""

from __future__ import annotations

import inspect

import pytest

from tables import table


def test_every_row_is_tried_and_those_that_fail_are_named() -> None:
    tried = []

    @table(("number", "name"), [(1, "one"), (2, "two"), (3, "three"), (4, "four")])
    def odd(number: int, name: str) -> None:
        tried.append(name)
        if number == 4:
            with pytest.raises(ValueError):
                pass
        assert number % 2

    with pytest.raises(AssertionError) as found:
        odd()
    assert tried == ["one", "two", "three", "four"]
    said = str(found.value).splitlines()
    assert said[0] == "2 of 4 rows fail:"
    assert said[1].startswith("number=2, name='two': AssertionError: ") and "test_tables.py" in said[1]
    assert said[2].startswith("number=4, name='four': Failed: DID NOT RAISE")


def test_tables_above_each_other_and_fixtures() -> None:
    seen = []

    @table("first", "ab")
    @table("second", [1, 2])
    def check(first: str, second: int, tmp: str) -> None:
        seen.append((first, second, tmp))
        assert (first, second) != ("b", 1)

    assert list(inspect.signature(check).parameters) == ["tmp"]
    with pytest.raises(AssertionError, match=r"1 of 2 rows fail:\nfirst='b': .*1 of 2 rows fail:\nsecond=1: Ass"):
        check(tmp="here")
    assert seen == [("a", 1, "here"), ("a", 2, "here"), ("b", 1, "here"), ("b", 2, "here")]


def test_a_table_without_rows_fails() -> None:
    with pytest.raises(AssertionError, match="no rows"):
        table("row", [])(lambda row: None)()

"""Tables at every width: no number is cut, no line is too long, what is left out is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report.whole import WIDTHS, check_whole, drawn
from shardwise.report.console import bar, table
from shardwise.report.tables import Cell, Column, FittedTable, wrapped


def ranking(optional: tuple[str, ...] = ()) -> FittedTable:
    columns = ("", "sharding", "tp", "dp", "step", "tokens/s", "memory")
    rows = [("1", "ZeRO-1, ring, tp-cp-pp-dp", "8", "32", "27.3 s", "1,307,483", "71.4 GiB"),
            ("2", "none", "16", "128", "274 ms", "306,703", "980 MiB")]  # fmt: skip
    return table("The best", columns, rows, numbers_from=2, optional=optional)


def test_a_table_that_fits_has_every_column_on_a_line_of_its_own_height() -> None:
    lines = drawn(ranking(), width=80).splitlines()
    assert lines[:2] == ["The best", ""]
    assert lines[2].split() == ["sharding", "tp", "dp", "step", "tokens/s", "memory"]
    assert lines[4].endswith("8   32  27.3 s  1,307,483  71.4 GiB")
    assert lines[5].endswith("16  128  274 ms    306,703   980 MiB")


def test_words_wrap_before_anything_is_left_out() -> None:
    text = drawn(ranking(("memory",)), width=58)
    assert "Not shown" not in text
    assert "ZeRO-1, ring," in text


def test_optional_columns_go_in_their_order_and_are_named() -> None:
    text = drawn(ranking(("memory", "dp")), width=50)
    assert "Not shown at this width: memory." in text
    assert "71.4 GiB" not in text
    assert "128" in text
    both = drawn(ranking(("memory", "dp")), width=42)
    assert "Not shown at this width: dp; memory." in both


def test_what_does_not_fit_at_all_becomes_records() -> None:
    text = drawn(ranking(), width=40)
    assert "   sharding: ZeRO-1, ring, tp-cp-pp-dp\n" in text
    assert "   tp: 8   dp: 32   step: 27.3 s\n" in text
    assert "Not shown" not in text


def test_without_a_bound_every_column_is_there() -> None:
    text = drawn(ranking(("memory", "dp")), width=20, bounded=False)
    assert "71.4 GiB" in text
    assert "dp" in text.splitlines()[2]
    assert "Not shown" not in text


def test_bars_shrink_then_go() -> None:
    rows = [("weights", bar(0.5), "40.0 GiB"), ("gradients", bar(1.0), "80.0 GiB")]
    shown = table("", ("part", "share of the device", "bytes"), rows, numbers_from=2)
    assert "█" * 40 in drawn(shown, width=80)
    narrow = drawn(shown, width=40).splitlines()
    assert [line.count("█") for line in narrow if "GiB" in line] == [8, 17]
    gone = drawn(shown, width=28)
    assert "█" not in gone
    assert "Not shown at this width:\nshare of the device." in gone


def test_words_are_broken_between_words_and_never_within_a_number() -> None:
    assert wrapped("tp 2 · dp 16 · ZeRO-3 over 8", 12) == ["tp 2 · dp 16", "· ZeRO-3", "over 8"]
    assert wrapped("", 5) == [""]
    assert wrapped("a tp-cp-pp-dp order", 6) == ["a", "tp-cp-", "pp-dp", "order"]
    assert wrapped("abcdefgh", 3) == ["abc", "def", "gh"]


words = st.text("abc", min_size=1, max_size=9)
sentences = st.lists(words, max_size=6).map(" ".join)
figures = st.builds(lambda number, unit: f"{number:,}{unit}", st.integers(0, 10**9), st.sampled_from(("", " GiB", "%")))


@st.composite
def tables(draw: st.DrawFn) -> FittedTable:
    columns = tuple(Column(f"{draw(words)} {place}", draw(st.booleans())) for place in range(draw(st.integers(1, 9))))
    cells = [figures if column.numeric else sentences for column in columns]
    rows: list[tuple[Cell, ...]] = draw(st.lists(st.tuples(*cells), min_size=1, max_size=4))
    optional = draw(st.lists(st.sampled_from([column.name for column in columns[1:]] or [""]), unique=True, max_size=3))
    return FittedTable(draw(sentences), columns, tuple(rows), tuple(optional))


@pytest.mark.parametrize("width", [24, 40, *WIDTHS])
@settings(max_examples=30)
@given(shown=tables())
def test_every_cell_is_whole_or_its_column_is_named_as_left_out(width: int, shown: FittedTable) -> None:
    check_whole(shown, width)

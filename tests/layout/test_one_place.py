"""A search of the source for rank arithmetic: all of it is in `layout`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "shardwise"
# These number ranks of their own: the steps of an algorithm, the order of actions, the placement a schedule is made of.
OWN_NUMBERS = ("layout/", "collectives/", "pipeline/builders/", "spec/schedules.py")


def is_rank(node: ast.AST) -> bool:
    """Whether an expression stands for the number of a rank, by its name."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        node = node.left
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value).rpartition(".")[2] in ("members", "ranks")
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
        return False
    owner, _, name = ast.unparse(node).removesuffix("()").rpartition(".")
    return (name.endswith("rank") and name != "per_rank") or (owner, name) == ("rank", "number")


def is_mirror(node: ast.BinOp) -> bool:
    """Whether a rank is counted from the other end: p - 1 - rank."""
    end = ast.unparse(node.left)
    return is_rank(node.right) and (end.endswith(" - 1") or end == "last")


def rank_arithmetic(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            divided = isinstance(node.op, (ast.FloorDiv, ast.Mod)) and is_rank(node.left)
            if divided or (isinstance(node.op, ast.Sub) and is_mirror(node)):
                yield ast.unparse(node)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.op, (ast.FloorDiv, ast.Mod)) and is_rank(node.target):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] == "stride":
            yield ast.unparse(node)  # of a dimension; a tensor's has no arguments


def test_rank_arithmetic_is_in_one_place() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {one}"
        for path in sorted(SOURCE.rglob("*.py"))
        if not str(path.relative_to(SOURCE)).startswith(OWN_NUMBERS)
        for one in rank_arithmetic(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("rank // node_devices", True),
        ("record.rank // stride % job.strategy.pp", True),
        ("dist.get_rank() % 8", True),
        ("rank.number % 4", True),
        ("one.members[0] // inside", True),
        ("rank //= strategy.degree(name)", True),
        ("strategy.stride('pp')", True),
        ("2 * p - 1 - rank", True),
        ("last - rank", True),
        ("tokens * rank // size", False),  # a rank's part of some tokens
        ("(rank + 1) % size", False),  # the next of a ring
        ("1 - rank", False),  # the other of two
        ("tensor.stride()", False),
        ("per_rank % strategy.cp", False),
        ("ranks % expert_tp", False),  # a number of ranks
        ("world // ranks_per_host", False),
    ],
)
def test_the_search_itself_finds_rank_arithmetic(source: str, found: bool) -> None:
    assert any(rank_arithmetic(source)) == found

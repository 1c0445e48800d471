"""What powersgd sends for the parameters of a rank: two thin matrices for every matrix, and the rest as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.layout.stages import RankContents
from shardwise.spec.less_communication import low_rank
from shardwise.spec.model import Matrix, Model
from shardwise.spec.strategy import Strategy


class ThinElements(NamedTuple):
    """Elements of the first sum (left factors, and what is no matrix) and of the second (right factors)."""

    first: float
    second: float


def thin_elements(model: Model, strategy: Strategy, contents: RankContents) -> tuple[ThinElements, ThinElements]:
    """Of the dense parameters and of the experts of a rank."""
    rank = strategy.compression.rank
    dense = _thin(rank, contents.dense, _dense_matrices(model, strategy, contents))
    return dense, _thin(rank, contents.experts, _expert_matrices(model, strategy, contents))


def _thin(rank: int, parameters: float, matrices: Iterator[tuple[float, float, float]]) -> ThinElements:
    left = right = replaced = 0.0
    for count, rows, columns in matrices:
        width = low_rank(rank, rows, columns)
        if width:
            left += count * rows * width
            right += count * columns * width
            replaced += count * rows * columns
    return ThinElements(left + parameters - replaced, right)


def _dense_matrices(model: Model, strategy: Strategy, contents: RankContents) -> Iterator[tuple[float, float, float]]:
    """How many, rows and columns on a device."""
    tp, moe = strategy.tp, model.moe
    shared = model.mlp_matrices(moe.shared_ffn) if moe and moe.shared_ffn else ()
    for matrix in model.attention_matrices:
        yield (contents.layers, *_cut(matrix, tp))
    for matrix in model.mlp_matrices(model.ffn):
        yield (contents.dense_layers, *_cut(matrix, tp))
    for matrix in (*shared, *(model.router_matrices if moe else ())):
        yield (contents.moe_layers, *_cut(matrix, tp))
    vocabulary = (model.vocab / tp, float(model.hidden))
    if contents.has_embedding:
        yield (1, *vocabulary)
        if model.positions == "learned":
            yield (1, model.max_seq, model.hidden)
    if contents.has_head and not (model.tied_embeddings and contents.has_embedding):
        yield (1, *vocabulary)


def _expert_matrices(model: Model, strategy: Strategy, contents: RankContents) -> Iterator[tuple[float, float, float]]:
    if model.moe is None:
        return
    for matrix in model.mlp_matrices(model.moe.ffn):
        count = contents.moe_layers * model.moe.experts / strategy.ep
        yield (count, *_cut(matrix, strategy.expert_tensor_parallel))


def _cut(matrix: Matrix, tensor: int) -> tuple[float, float]:
    rows, columns, share = float(matrix.outputs), float(matrix.inputs), matrix.share(tensor)
    if matrix.split == "column":
        rows *= share
    elif matrix.split == "row":
        columns *= share
    return rows, columns

"""Where packed documents begin and end, told without waiting for a count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwise.models.dot_product import document_bounds
from shardwise.run.data.order import Rows
from shardwise.training.loop import batch_of


def test_bounds_are_those_of_every_document() -> None:
    found = document_bounds(torch.tensor([[0, 0, 1], [4, 4, 4]]), 2)
    assert found.tolist() == [0, 2, 3, 6, 6]
    assert found.dtype == torch.int32


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 16])
def test_a_batch_knows_how_many_documents_its_rows_have(most: int) -> None:
    documents = np.stack([np.minimum(np.arange(32), most - 1), np.arange(32) // 32])
    batch = batch_of(Rows(0, documents, documents, documents, documents), torch.device("cpu"))
    if most == 1:
        assert batch.documents is None
        return
    assert batch.documents is not None and batch.most_documents is not None
    assert most <= batch.most_documents < 2 * most
    for part in batch.microbatches(2):
        assert part.documents is not None and part.most_documents is not None
        bounds = document_bounds(part.documents, part.most_documents)
        lengths = bounds.diff()
        assert lengths.sum() == part.tokens.numel()
        assert int((lengths > 0).sum()) == len(part.documents.unique())

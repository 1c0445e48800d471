"""A small network of stages, the same in one process and cut over a pipeline, for tests of the pipeline alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.patterns import Patterns
from shardwise.engine.pipeline.runtime import Mailbox, Message, PipelineRunner, Reduction
from shardwise.engine.pipeline.tied import TiedEnds
from shardwise.pipeline import PipelineSchedule, build

WIDTH, VOCABULARY, SEQUENCE, ROWS = 8, 11, 5, 2
PATTERNS = Patterns(layers="blocks.*", embedding="embedding", norm="", head="head", regions=())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return result


class ToyStage(nn.Module):
    """Any run of blocks, with the embedding before the first and the loss behind the last."""

    def __init__(self, blocks: dict[str, Block], embedding: nn.Embedding | None, head: nn.Linear | None) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.ModuleDict(blocks), head

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor,
        documents: Tensor | None = None,
        most_documents: int | None = None,
    ) -> Tensor:
        hidden: Tensor = inputs if self.embedding is None else self.embedding(inputs)
        for block in self.blocks.values():
            hidden = block(hidden) + (0.01 * positions.unsqueeze(-1)).to(hidden.dtype)
        if self.head is None:
            return hidden
        logits = self.head(hidden).flatten(0, -2)
        assert labels is not None
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def whole_model(stages: int, tied: bool = False) -> ToyStage:
    torch.manual_seed(0)
    blocks = {str(index): Block() for index in range(stages)}
    model = ToyStage(blocks, nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    if tied:
        assert model.embedding is not None and model.head is not None
        model.head.weight = model.embedding.weight
    return model


def stage_of(model: ToyStage, index: int, stages: int) -> ToyStage:
    """Stage ``index`` with the parameters of ``model``: block ``index``, and what belongs to an end."""
    embedding = model.embedding if index == 0 else None
    head = model.head if index == stages - 1 else None
    return ToyStage({str(index): model.blocks[str(index)]}, embedding, head)  # type: ignore[dict-item]


def batch_of(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return Batch.of(tokens[:, :-1], labels)


def message(dtype: torch.dtype = torch.float32) -> Message:
    return Message((ROWS, SEQUENCE, WIDTH), dtype, torch.device("cpu"))


def runner_of(
    schedule: PipelineSchedule,
    modules: dict[int, nn.Module],
    group: dist.ProcessGroup,
    reductions: Mapping[nn.Module, Reduction] | None = None,
    tied: TiedEnds | None = None,
    dtype: torch.dtype = torch.float32,
) -> PipelineRunner:
    mailbox = Mailbox(group, message(dtype))
    return PipelineRunner(schedule, modules, group.rank(), mailbox, reductions=reductions, tied=tied)


def schedule_for(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    return build(name, ranks, microbatches, 2 if name == "interleaved" else None)


def reference(model: ToyStage, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(batch.tokens, batch.labels, positions=batch.positions) / batch.counted
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients


def deviation(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())

"""The same on a GPU: one rank with all stages, no wait of the host, layers recomputed on autograd's own thread."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.pipeline import toy_pipeline as toy
from engine.workers import on_ranks
from shardwise.engine.batch import Batch
from shardwise.engine.pipeline.runtime import Mailbox, Message, PipelineRunner
from shardwise.pipeline import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, hidden, use_reentrant=False)
        return output


def on_gpu(name: str, recomputed: bool) -> tuple[float, float]:
    """Deviations of the loss and of the worst gradient from the CPU's."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    device, schedule = torch.device("cuda"), build(name, 1, 4)
    batch = toy.batch_of(4 * toy.ROWS)
    reference, gradients = toy.reference(toy.whole_model(schedule.stages), batch)
    model = toy.whole_model(schedule.stages).to(device)
    if recomputed:
        for index, block in model.blocks.items():
            model.blocks[index] = Recomputed(block)
    modules: dict[int, nn.Module] = {
        index: toy.stage_of(model, index, schedule.stages) for index in range(schedule.stages)
    }
    message = Message((toy.ROWS, toy.SEQUENCE, toy.WIDTH), torch.float32, device)
    group = dist.distributed_c10d._get_default_group()
    runner = PipelineRunner(schedule, modules, group.rank(), Mailbox(group, message))
    there: Batch = batch.changed(lambda tensor: tensor.to(device))
    microbatches, tokens = there.microbatches(4), there.counted
    torch.cuda.set_sync_debug_mode("error")
    loss = runner.step(microbatches, tokens)
    torch.cuda.set_sync_debug_mode("default")
    named = {
        name.replace(".block.", "."): one for module in modules.values() for name, one in module.named_parameters()
    }
    worst = max(toy.deviation(one.grad.cpu(), gradients[name]) for name, one in named.items())
    return toy.deviation(loss.cpu(), reference), worst


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipev"])
def test_one_rank(name: str, recomputed: bool) -> None:
    ((loss, worst),) = on_ranks(1, on_gpu, name, recomputed)
    assert loss < 1e-5 and worst < 1e-4

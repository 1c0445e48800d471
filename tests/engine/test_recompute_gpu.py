"""Recompute and compilation where there is a GPU: kernels that fuse, and the compiler's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cost.builders import job
from shardwise.cost.memory.activations import layer_activation_bytes
from shardwise.engine.engine import apply_compile
from shardwise.engine.patterns import DECODER
from shardwise.engine.recompute import apply_recompute
from shardwise.models.decoder import Decoder, initialise
from shardwise.spec.layers import LatentAttention
from shardwise.spec.model import MixtureOfExperts, Model
from shardwise.spec.stack import default_stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SEQUENCE, BATCH = 2048, 2
LLAMA = Model(layers=4, hidden=1024, heads=8, kv_heads=4, ffn=4096, vocab=1024, activation="swiglu", norm="rmsnorm",
              norm_bias=False)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "latent": replace(LLAMA, kv_heads=8, mla=LatentAttention(
        kv_rank=256, nope_dim=128, rope_dim=64, value_dim=128, q_rank=512)),
    "mixture": replace(LLAMA, moe=MixtureOfExperts(experts=8, top_k=2, ffn=1024)),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {"none": {}, "cheap": {"recompute": "selective"}, "full": {"recompute": "full"}}


def trained(model: Model, strategy: dict[str, Any], compiled: bool) -> tuple[float, float, float, float]:
    """Bytes kept by the layers, those planned, the loss and the norm of the gradients."""
    torch._dynamo.reset()
    training = {"seq": SEQUENCE, "precision": "bf16"}
    planned = replace(
        job(model, training=training, **{"microbatch": BATCH, "dp": 1, **strategy}), stack=default_stack()
    )
    with torch.device("cuda"):
        decoder = Decoder(model).to(torch.bfloat16)
    initialise(decoder, 0, model)
    apply_recompute(decoder, planned, DECODER)
    if compiled:
        apply_compile(decoder, planned.strategy, DECODER)
    decoder.head = None
    tokens = torch.randint(model.vocab, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(2):  # the first time libraries take their workspaces
        decoder.zero_grad()
        before = torch.cuda.memory_allocated()
        hidden = decoder(tokens)
        kept = torch.cuda.memory_allocated() - before
        loss = hidden.float().square().mean()
        loss.backward()
    gradients = [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]
    layers = model.layers * layer_activation_bytes(planned, *model.kinds)
    return kept, layers, loss.item(), torch.nn.utils.get_total_norm(gradients).item()


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_keeps_what_the_planner_says(name: str) -> None:
    model = MODELS[name]
    hidden = BATCH * SEQUENCE * model.hidden * 2
    expected = trained(model, {}, False)
    for way, strategy in WAYS.items():
        for compiled in (False, True):
            kept, planned, loss, norm = trained(model, strategy, compiled)
            print(f"{name} {way} {'compiled' if compiled else 'eager'}: kept {kept / 2**20:.1f} MiB, "
                  f"planned {planned / 2**20:.1f} MiB for the layers, loss {loss:.7f}, norm {norm:.6f}")  # fmt: skip
            tolerance = 2e-2 if compiled else 0.0  # the compiler rounds elsewhere
            assert loss == pytest.approx(expected[2], rel=tolerance)
            assert norm == pytest.approx(expected[3], rel=tolerance or 1e-3)
            # Besides the layers: the final norm's input and output, cosines and sines, and tables of the routing.
            assert kept <= 1.02 * planned + 3 * hidden, (way, compiled)
            if not compiled:
                assert kept >= planned, way

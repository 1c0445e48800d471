"""What the decoder cannot compute: one line that says so, before anything is built."""

from __future__ import annotations

from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model


def require_supported(model: Model) -> None:
    """Raises SpecError for the first thing in ``model`` that the decoder would silently get wrong."""
    for field, wrong, problem, remedy in (
        ("mtp_layers", model.mtp_layers > 0, "multi-token prediction is not trained", "set mtp_layers: 0"),
        ("parallel_block", model.parallel_block, "attention beside the MLP is not built", "set parallel_block: false"),
        (
            "norms_per_layer",
            model.norms_per_layer != 2,
            f"{model.norms_per_layer} norms in a layer are not built",
            "use 2: one before attention, one before the MLP",
        ),
        (
            "embedding_norm",
            model.embedding_norm or model.token_types > 0 or model.pooler or model.mlm_head,
            "BERT-like encoders are not built",
            "use a decoder such as gpt2",
        ),
        (
            "moe.router_bias",
            model.moe is not None and model.moe.router_bias and model.moe.router == "softmax",
            "a bias on a softmax router (gpt-oss) is not built",
            "use router: sigmoid, or router_bias: false",
        ),
        (
            "qk_norm",
            model.mla is not None and model.qk_norm,
            "norms of queries and keys are not built for latent attention",
            "set qk_norm: false",
        ),
        (
            "positions",
            model.positions == "rope" and (model.mla.rope_dim if model.mla else model.head_size) % 2 == 1,
            "rope turns pairs of features, and a head has an odd number",
            "use an even head size",
        ),
    ):  # fmt: skip
        if wrong:
            raise SpecError(f"model.{field}", f"{problem} ({model.name})", remedy)

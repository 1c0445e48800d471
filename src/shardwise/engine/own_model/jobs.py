"""The job of a user's own network, given only a strategy and training settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.engine.own_model.tables import is_hugging_face
from shardwise.engine.units import find_layers
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def job_for(module: nn.Module, strategy: Strategy, training: Training | None, world: int) -> Job:
    """On ``world`` processes of this machine's kind."""
    training = training or Training(precision="fp32")
    model = described(module) or _placeholder(module)
    # How long its sequences may be is the module's own affair.
    model = replace(model, max_seq=max(model.max_seq, training.seq), published_parameters=None)
    cluster = cluster_from(f"laptop:{world}")
    return Job(model=model, cluster=cluster, strategy=strategy, training=training)


def described(module: nn.Module) -> Model | None:
    """What a network says of itself; None if it says nothing, or what no `Model` holds."""
    try:
        return read_description(module)
    except SpecError:
        return None


def read_description(module: nn.Module) -> Model | None:
    """What a Hugging Face network's config says; raises SpecError for what no `Model` holds."""
    config: Any = getattr(module, "config", None)
    if not is_hugging_face(module) or not hasattr(config, "to_dict"):
        return None
    return model_from_hf_config(config.to_dict())


def _placeholder(module: nn.Module) -> Model:
    """Data parallelism, precision and recompute ask nothing of a model but its layers."""
    return Model(layers=max(1, len(find_layers(module))), hidden=1, heads=1, ffn=1, vocab=1, name=type(module).__name__)

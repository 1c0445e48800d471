"""Checks before anything starts: layouts and prompts that cannot be run."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.engine.refuse import require_runs
from shardwise.generation.request import GenerationRequest
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training


def layout_of(model: Model, tp: int, dtype: str) -> Job:
    """The training layout in which ranks hold the model; raises SpecError if it does not run.

    It has no sequence parallelism, since a single new token cannot be divided.
    """
    if not model.causal:
        raise SpecError("model", f"{model.name} is not causal: it predicts no next token", "generate with a decoder")
    strategy = Strategy(tp=tp, dp=1, sequence_parallel=False)
    training = Training(global_batch=1, seq=1, precision=dtype)  # type: ignore[arg-type]
    try:
        job = Job(model=model, cluster=cluster_from(f"laptop:{tp}"), strategy=strategy, training=training)
        require_runs(job)
    except SpecError as error:
        if error.field not in ("strategy.tp", "strategy.expert_tp"):
            raise
        raise SpecError("--tp", error.problem, error.remedy) from None
    return job


def require_prompt(model: Model, prompt: Sequence[int], request: GenerationRequest, where: str) -> None:
    """Raises SpecError for a prompt that the model cannot read, or cannot continue for as long as requested."""
    if not prompt:
        raise SpecError(where, "is empty", "give at least one token")
    wrong = next((token for token in prompt if not 0 <= token < model.vocab), None)
    if wrong is not None:
        problem = f"holds the token {wrong}, and {model.name} has {model.vocab:,}"
        raise SpecError(where, problem, "use the model's own tokenizer")
    read = len(prompt) + request.max_new_tokens - 1  # the last token is not read
    scaling = model.numerics.rope_scaling
    if model.positions == "learned" and read > model.max_seq:
        problem = f"{len(prompt)} tokens and {request.max_new_tokens} new ones"
        raise SpecError(where, f"{problem}, but {model.name} has {model.max_seq:,} positions", "lower --max-new-tokens")
    # Beyond this its factors change for all tokens, which would invalidate the cache.
    if model.positions == "rope" and scaling is not None and scaling.kind == "longrope":
        assert scaling.original_seq
        if read > scaling.original_seq:
            problem = f"{len(prompt)} tokens and {request.max_new_tokens} new ones go beyond {scaling.original_seq:,}"
            raise SpecError(where, f"{problem}, where longrope rotates otherwise", "lower --max-new-tokens")

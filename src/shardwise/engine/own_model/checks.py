"""Refuses what cannot be done correctly with a user's own network, before anything is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

import torch.distributed as dist
from torch import nn

from shardwise.engine.optim.optimizer import is_hidden_matrix
from shardwise.engine.own_model.network import dropout_of
from shardwise.engine.own_model.tables import SUPPLIED, described, is_hugging_face, read_description
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.tensor.linear import is_linear, sizes
from shardwise.engine.torch_private import BatchNorm
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy

_NEED_A_TABLE = ("tp", "cp", "pp", "ep")
_ROLES = (
    "columns", "rows", "fused", "divided", "regions", "flat", "layers", "embedding", "position_embedding", "norm",
    "head", "experts", "attention",
)  # fmt: skip
_CLASSES = {**dict.fromkeys(("columns", "rows", "fused", "head"), nn.Linear), "embedding": nn.Embedding}
_DESCRIBED = ("layers", "hidden", "heads", "key_value_heads", "vocab", "moe")


def require_table(module: nn.Module, strategy: Strategy, patterns: Patterns | None) -> None:
    """Refuses to cut a network without a table: only techniques that treat all modules alike are possible."""
    if patterns is not None:
        return
    for name in _NEED_A_TABLE:
        degree = getattr(strategy, name)
        if degree > 1:
            raise SpecError(
                f"strategy.{name}",
                f"{degree}, but no table says what the modules of {type(module).__name__} are",
                f"pass patterns=, or use dp and zero; known without are {', '.join(SUPPLIED)}",
            )


def is_cut(strategy: Strategy) -> bool:
    """Whether the network itself is cut, which no kind of data parallelism does."""
    return any(getattr(strategy, name) > 1 for name in _NEED_A_TABLE)


def has_dropout(module: nn.Module) -> bool:
    return module.training and dropout_of(module) > 0


def require_described(module: nn.Module, strategy: Strategy) -> None:
    """Refuses a strategy without a job where the strategy depends on a shape that the network does not describe."""
    if not is_cut(strategy):
        return
    try:
        model = read_description(module)
    except SpecError as error:
        raise error.under("module.config") from None
    if model is None:
        problem = f"is only a strategy, which does not describe the heads and layers of {type(module).__name__}"
        raise SpecError("job", problem, "give a Job, whose model does")


def require_world(strategy: Strategy) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 0
    if world != strategy.world:
        problem = f"has {strategy.world} ranks, but {world} processes have joined"
        raise SpecError("strategy", problem, "start that many with torch.distributed.init_process_group")


def require_trainable(module: nn.Module, job: Job, tabled: bool, initialised: bool) -> None:
    """Checks that depend on the modules, not on the table."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = next((name for name, tensor in tensors if tensor.is_meta), None)
    if on_meta and not initialised:
        raise SpecError("module", f"{on_meta} has no values (meta device)", "give it values, or pass initialise=")
    batch_norms = (name for name, part in module.named_modules() if isinstance(part, BatchNorm) and part.training)
    normed = next(batch_norms, None)
    if normed is not None:
        problem = f"{normed} takes its statistics from the samples of one rank and microbatch"
        raise SpecError("module", problem, "use LayerNorm or GroupNorm, or put it into eval mode")
    if tabled and has_dropout(module):
        problem = f"has dropout {dropout_of(module):g}, and split layers would draw different random masks"
        raise SpecError("module", problem, "set its dropout to 0")
    if job.training.freezes:
        problem = "choose what of our own decoder is trained, not of your module"
        raise SpecError("training", f"adapters and trained {problem}", "give the module its adapters, freeze the rest")
    if job.training.compile:
        problem = "true, but your own layers may not compile as a whole or between their collectives"
        raise SpecError("training.compile", problem, "leave it out")
    if job.training.optimizer == "muon" and not any(
        is_hidden_matrix(*parameter) for parameter in module.named_parameters()
    ):
        problem = f"muon, but {type(module).__name__} has no weight matrices below a module called layers"
        raise SpecError("training.optimizer", problem, "call the list of blocks layers, or use adamw")
    if not tabled and job.training.attention == "unfused":
        problem = f"unfused, but no table says what attention is in {type(module).__name__}"
        raise SpecError("training.attention", problem, "leave it out, and choose where the network is made")
    config = getattr(module, "config", None)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if tabled and capped and getattr(config, "_attn_implementation", "") == "sdpa":
        # transformers 5.17 takes sdpa for such a model and leaves the cap out; 5.22 refuses it.
        problem = "sdpa leaves out the soft cap of the attention scores (attn_logit_softcapping)"
        raise SpecError("module.config", problem, "build the model with attn_implementation='eager'")
    if tabled and getattr(config, "output_router_logits", False):
        problem = "its balance loss is a mean over the tokens of one rank, which would depend on the layout"
        raise SpecError("module.config.output_router_logits", problem, "set it to False")


def require_matching(module: nn.Module, patterns: Patterns, job: Job, own_loss: bool) -> None:
    """Checks that every pattern matches modules of the right kind, which divide as the strategy needs."""
    for field, pattern, kind in _expected(patterns):
        matches = list(matching(module, pattern))
        if not matches:
            raise SpecError(f"patterns.{field}", f"{shown(pattern)} matches no module", "correct it, or leave it out")
        linear = field in ("columns", "rows", "fused")
        others = (name for name, part in matches if not (isinstance(part, kind) or (linear and is_linear(part))))
        wrong = next(others, None)
        if wrong is not None:
            raise SpecError(f"patterns.{field}", f"{wrong} is not a {kind.__name__}", "name modules of that class")
    _require_attributes(module, patterns)
    _require_supported(module, patterns, job.strategy)
    _require_plain(module, patterns, job.strategy, own_loss)
    _require_roles(module, patterns, job)
    _require_same_model(module, patterns, job)
    _require_division(module, patterns, job)


def _expected(patterns: Patterns) -> Iterator[tuple[str, str, type[nn.Module]]]:
    for field in _ROLES:
        named = getattr(patterns, field)
        for pattern in (named,) if isinstance(named, str) else named:
            if pattern:
                yield "regions" if field == "flat" else field, pattern, _CLASSES.get(field, nn.Module)


def _require_attributes(module: nn.Module, patterns: Patterns) -> None:
    """Checks that the attributes to read or change exist."""
    places = [("layer_lists", module, path) for path in patterns.layer_lists]
    places += [("logit_cap", module, f"config.{patterns.logit_cap}")] if patterns.logit_cap else []
    for pattern, paths in patterns.divided.items():
        places += [("divided", part, path) for _, part in matching(module, pattern) for path in paths]
    for field, part, path in places:
        try:
            attrgetter(path)(part)
        except AttributeError:
            problem = f"{type(part).__name__} has no attribute {path}"
            raise SpecError(f"patterns.{field}", problem, "correct it, or leave it out") from None


def _require_plain(module: nn.Module, patterns: Patterns, strategy: Strategy, own_loss: bool) -> None:
    """Checks that modules to be replaced do what their class does and nothing else."""
    places = (
        [("embedding", patterns.embedding), *(("rows", pattern) for pattern in patterns.rows)]
        if strategy.tp > 1
        else []
    )
    places += [("head", patterns.head)] if strategy.tp > 1 or not own_loss else []
    for field, pattern in places:
        for name, part in matching(module, pattern):
            known = hasattr(part, "embed_scale") or (is_linear(part) and not isinstance(part, nn.Linear))
            if not known and type(part).forward not in (nn.Linear.forward, nn.Embedding.forward):
                problem = f"{name} has a forward pass of its own ({type(part).__name__}), which would be bypassed"
                raise SpecError(f"patterns.{field}", problem, "use torch's class, or dp and zero with loss=")


def _require_supported(module: nn.Module, patterns: Patterns, strategy: Strategy) -> None:
    """Checks that the network itself supports the strategy."""
    for name, why in patterns.refused.items():
        value = getattr(strategy, name)
        if name == "sequence_parallel" and strategy.tp > 1 and value:
            raise SpecError(f"strategy.{name}", f"true, but {type(module).__name__} {why}", "set it to false")
        if name != "sequence_parallel" and value > 1:
            others = ", ".join(dimension for dimension in ("tp", "cp", "pp") if dimension not in patterns.refused)
            raise SpecError(
                f"strategy.{name}", f"{value}, but {type(module).__name__} {why}", f"use {others}, dp or zero"
            )


def _require_roles(module: nn.Module, patterns: Patterns, job: Job) -> None:
    """Checks that the table names what each dimension needs."""
    strategy = job.strategy
    needed = {
        "tp": ("regions", "columns", "rows", "embedding", "head"),
        "cp": ("attention", "positions"),
        "pp": ("layers", "embedding", "head"),
        "ep": ("experts", "expert_features"),
    }
    for dimension, fields in needed.items():
        named = {field: getattr(patterns, field) for field in fields}
        if patterns.fused:
            named["columns"] = True
        missing = next((field for field in fields if not named[field]), None)
        if getattr(strategy, dimension) > 1 and missing:
            problem = f"{getattr(strategy, dimension)}, but the table does not name {missing}"
            raise SpecError(f"strategy.{dimension}", problem, f"give Patterns({missing}=...)")
    for name, attention in matching(module, patterns.attention):
        if strategy.cp > 1 and not is_hugging_face(module) and not hasattr(attention, "attend"):
            problem = f"{name} has no attribute attend for context parallelism to replace"
            raise SpecError("patterns.attention", problem, "set it to shardwise.models' dot_product_attention")
    if strategy.pp > 1 and not patterns.layers.endswith(".*"):
        raise SpecError("patterns.layers", f"{shown(patterns.layers)} names no list of layers", "end it with .*")
    if patterns.experts and not patterns.experts.endswith("experts"):
        problem = f"{shown(patterns.experts)} is known to data parallelism only by its last word"
        raise SpecError("patterns.experts", problem, "call the module experts")


def _require_same_model(module: nn.Module, patterns: Patterns, job: Job) -> None:
    """Checks that the job was planned for this network."""
    model, description = job.model, described(module)
    for field in _DESCRIBED if description else ():
        asked, there = getattr(model, field), getattr(description, field)
        if asked != there:
            problem = f"{shown(str(asked))}, but the module has {shown(str(there))}"
            raise SpecError(f"model.{field}", problem, "describe the module you pass")
    layers = len(list(matching(module, patterns.layers)))
    if patterns.layers and job.strategy.pp > 1 and layers != model.layers:
        problem = f"{model.layers}, but {shown(patterns.layers)} matches {layers}"
        raise SpecError("model.layers", problem, "describe the module you pass")
    for name, experts in matching(module, patterns.experts):
        for own, parameter in experts.named_parameters(recurse=False):
            if own not in patterns.expert_features:
                problem = f"does not name {name}.{own}"
                raise SpecError("patterns.expert_features", problem, "give its dimension and number of blocks")
            if model.moe is None or parameter.shape[0] != model.moe.experts:
                problem = f"does not describe the {parameter.shape[0]} experts of {name}"
                raise SpecError("model.moe", problem, "describe the module you pass")


def _require_division(module: nn.Module, patterns: Patterns, job: Job) -> None:
    tp = job.strategy.tp
    for pattern, heads in patterns.columns.items():
        for name, part in matching(module, pattern):
            if not heads and sizes(part)[1] % tp:
                raise SpecError("strategy.tp", f"{tp} does not divide the outputs of {name}", "use a divisor")
    for pattern, counts in patterns.fused.items():
        odd = next((count for count in counts if getattr(job.model, count) % tp), None)
        if odd:
            problem = f"{tp} does not divide the {getattr(job.model, odd)} {odd} inside {shown(pattern)}"
            raise SpecError("strategy.tp", problem, "use a divisor")
    for pattern in patterns.rows:
        for name, part in matching(module, pattern):
            if sizes(part)[0] % tp:
                raise SpecError("strategy.tp", f"{tp} does not divide the inputs of {name}", "use a divisor")

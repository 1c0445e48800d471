"""Megatron-LM folders, with the names of Megatron core; weights keep the type they were trained in.

``--ckpt-format torch``: ``iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt`` holds a rank's part under ``model``, with
layers counted from 0; tensor and pipeline ranks are merged. ``torch_dist``: a distributed checkpoint of whole tensors,
in which equal layers are stacked, with the arguments in ``common.pt``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.interop.frameworks.megatron_model import interpret
from shardwise.interop.frameworks.target import Reading
from shardwise.interop.keys import unflatten
from shardwise.models import Decoder
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.model import Model
from shardwise.training.checkpoint.full_tensors import LazyTensor
from shardwise.training.convert.torch_file import fields_of, read_torch_file
from shardwise.training.convert.weights import Weights, complete, is_distributed, lazily, stored_tensors

LATEST = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_FILE = "model_optim_rng.pt"
_COMMON = "common.pt"  # beside the tensors of torch_dist: what all ranks share
_NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state")
# Settings that change the meaning of the same tensors: folders that use one are not read.
_NOT_READ = {
    "num_experts": "experts", "multi_latent_attention": "latent attention", "rotary_interleaved": "interleaved rope",
    "apply_layernorm_1p": "norms around one", "mtp_num_layers": "multi-token prediction",
    "heterogeneous_layers_config_path": "layers of several shapes", "is_hybrid_model": "layers without attention",
}  # fmt: skip
# Switches whose attribute is the negation.
_NEGATED = {"add_bias_linear": "--disable-bias-linear", "bias_gelu_fusion": "--no-bias-gelu-fusion"}

Stored = dict[str, list[LazyTensor]]
# Stored beside the weights, or copies of them; the tied embedding on the last stage is left out as well.
_LEFT_OUT = ("_extra_state", "rotary_pos_emb.inv_freq")


def is_megatron(folder: Path) -> bool:
    if (folder / LATEST).is_file() or ((folder / _COMMON).is_file() and is_distributed(folder)):
        return True
    return any(_RANK.fullmatch(path.name) for path in folder.iterdir())


def megatron_weights(source: Path, given: Model | None) -> Weights:
    """The weights of the newest iteration, for the model that the user or the checkpoint's arguments describe."""
    folder = _iteration_folder(source)
    states: dict[tuple[int, int], dict[Any, Any]] = {}
    if not is_distributed(folder):
        states = {rank: _state(path) for rank, path in _ranks(folder).items()}
        common = states[0, 0]
    else:
        common = _state(folder / _COMMON) if (folder / _COMMON).is_file() else {}
    arguments = fields_of(common.get("args"))
    _require_readable(arguments, folder, common.get("checkpoint_version"))
    stored = _joined(_stages(states, folder)) if states else _whole_tensors(folder)
    layers = len({int(match[1]) for name in stored if (match := _LAYER.match(name))})
    model = given or _model_of(arguments, folder)
    if layers != model.layers:
        raise SpecError(str(folder), f"has {layers} layers, {model.name} has {model.layers}", "name the right model")
    tp, pp = (max((rank[axis] for rank in states), default=0) + 1 for axis in (0, 1))
    if model.key_value_heads % tp:
        problem = f"repeats its {model.key_value_heads} key-value heads over {tp} tensor ranks"
        raise SpecError(str(folder), problem, "save it with fewer tensor ranks")
    origin = f"the Megatron-LM folder {folder} ({f'tp {tp}, pp {pp}' if states else 'torch_dist'})"
    step = common.get("iteration")
    step = step if type(step) is int and step >= 0 else 0
    return complete(model, merged(model, stored, origin), origin, step)


def _whole_tensors(folder: Path) -> Stored:
    stored: Stored = {}
    for name, tensor in stored_tensors(folder).items():
        if name.startswith(_NO_WEIGHTS):
            continue
        before, stacked, after = name.partition("decoder.layers.")
        if stacked and not after.partition(".")[0].isdigit():
            numbers = range(tensor.shape[0] if tensor.shape else 0)
            stored |= {f"{before}{stacked}{number}.{after}": [tensor.entry(number)] for number in numbers}
        else:
            stored[name] = [tensor.whole()]
    return stored


def _iteration_folder(source: Path) -> Path:
    latest = source / LATEST
    folder = source
    if latest.is_file():
        text = latest.read_bytes()[:100].decode(errors="replace").strip()
        if not (text.isascii() and text.isdigit()) and text != "release":
            problem = f"says {shown(text)}, which is not an iteration"
            raise SpecError(str(latest), problem, "name the iteration's folder")
        folder = source / (text if text == "release" else f"iter_{int(text):07d}")
        if not folder.is_dir():
            raise SpecError(str(folder), "is missing", "name the folder of an iteration that is there")
    return folder


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """The file of every (tensor, pipeline) rank; raises SpecError if one is missing."""
    files = {}
    for path in folder.iterdir():
        if match := _RANK.fullmatch(path.name):
            files[int(match[1]), int(match[2] or 0)] = path / _FILE
    if not files:
        raise SpecError(str(folder), f"has no mp_rank_00/{_FILE}", "name the folder that Megatron-LM has saved")
    tp, pp = (max(rank[axis] for rank in files) + 1 for axis in (0, 1))
    for rank in ((t, p) for t in range(tp) for p in range(pp)):
        if rank not in files or not files[rank].is_file():
            problem = f"lacks {_FILE} of tensor rank {rank[0]}, pipeline rank {rank[1]}"
            raise SpecError(str(folder), problem, "copy all ranks' files")
    return files


def _state(path: Path) -> dict[Any, Any]:
    state = read_torch_file(path)
    if not isinstance(state, dict):
        raise SpecError(str(path), "does not hold what Megatron-LM saves there", "name the folder that it has saved")
    return state


def _require_readable(arguments: Mapping[str, Any], folder: Path, version: Any) -> None:
    for name, what in _NOT_READ.items():
        if arguments.get(name):
            raise SpecError(str(folder), f"has {what}, which are not read ({name})", "convert it with its own tools")
    if arguments.get("rotary_percent", 1.0) != 1.0:
        problem = "applies rope to a part of each head (rotary_percent)"
        raise SpecError(str(folder), problem, "only rope on whole heads is supported")
    if isinstance(version, (int, float)) and version < 3:
        raise SpecError(str(folder), f"is of checkpoint version {version}", "versions from 3 on are read")


def _stages(states: Mapping[tuple[int, int], dict[Any, Any]], folder: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Each stage's number of layers and tensors of every tensor rank, along the pipeline, chunk by chunk."""
    tp, pp = (max(rank[axis] for rank in states) + 1 for axis in (0, 1))
    several = [f"model{number}" for number in range(100)]  # with interleaved stages
    chunks = [key for key in (["model"] if "model" in states[0, 0] else several) if key in states[0, 0]]
    stages = []
    for chunk in chunks:
        for pipeline in range(pp):
            parts = [states[tensor, pipeline].get(chunk) for tensor in range(tp)]
            held = [part for part in parts if isinstance(part, dict)]
            if len(held) < tp or any(set(part) != set(held[0]) for part in held):
                raise SpecError(str(folder), f"has ranks of pipeline stage {pipeline} that differ", "copy it again")
            if "language_model" in held[0]:
                raise SpecError(str(folder), "has the names before Megatron core", "convert it with its own tools")
            numbers = {int(match[1]) for name in held[0] if isinstance(name, str) and (match := _LAYER.match(name))}
            if numbers != set(range(len(numbers))):
                raise SpecError(str(folder), "has layers that are not counted from 0", "copy it again")
            stages.append((len(numbers), held))
    if not stages:
        raise SpecError(str(folder), "holds no model", "name the folder that Megatron-LM has saved")
    return stages


def _joined(stages: Sequence[tuple[int, list[dict[str, Any]]]]) -> Stored:
    """The tensors of all stages by their names in the whole model, with a part of each tensor rank."""
    whole_tensors: Stored = {}
    before = 0
    for count, held in stages:
        for name in held[0]:
            parts = [part[name] for part in held]
            if not isinstance(name, str) or not all(isinstance(part, Tensor) for part in parts):
                continue  # Transformer Engine keeps its own notes (_extra_state) beside tensors
            match = _LAYER.fullmatch(name)
            whole = f"decoder.layers.{int(match[1]) + before}.{match[2]}" if match else name
            whole_tensors[whole] = [lazily(part) for part in parts]
        before += count
    return whole_tensors


def _model_of(arguments: Mapping[str, Any], folder: Path) -> Model:
    """The model in the arguments that a checkpoint was trained with."""
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _NEGATED:
            settings[_NEGATED[name]] = not value
        elif isinstance(value, (bool, int, float, str)):
            settings[f"--{name.replace('_', '-')}"] = value
        elif name == "window_size" and isinstance(value, tuple):
            settings["--window-size"] = ",".join(map(str, value))
    fields: dict[str, Any] = {}
    try:
        interpret(Reading(settings, None, None, {}), fields)
        if not fields:
            raise SpecError("args", "names no layers", "")
        return replace(Model.from_dict(unflatten(fields)["model"]), name=f"megatron-{folder.parent.name or 'model'}")
    except SpecError as error:
        problem = f"does not say which model it is ({error.field}: {error.problem})"
        raise SpecError(str(folder), problem, "name it: ⟨model⟩") from None


Merge = Callable[[Sequence[Tensor]], Tensor]


def merged(model: Model, stored: Mapping[str, Sequence[LazyTensor]], origin: str) -> dict[str, LazyTensor]:
    """The tensors of a `Decoder` from Megatron's, which have a part for each tensor rank.

    Raises SpecError for tensors that are missing, of the wrong shape, or left over.
    """
    with torch.device("meta"):
        names = [name for name, _ in Decoder(model).named_tensors()]
    tensors: dict[str, LazyTensor] = {}
    used: set[str] = {"output_layer.weight"} if model.tied_embeddings else set()
    for name in names:
        candidates, merge = _source(name, model)
        theirs = next((candidate for candidate in candidates if candidate in stored), None)
        if theirs is None:
            raise SpecError(candidates[0], f"is missing in {origin}", "name the model that was trained (⟨model⟩)")
        used.add(theirs)
        tensors[name] = _lazy(theirs, stored[theirs], merge, origin)
    for theirs in sorted(stored.keys() - used):
        if not theirs.endswith(_LEFT_OUT):
            problem = f"in {origin} belongs to no part of {model.name}"
            raise SpecError(theirs, problem, "name the model that was trained (⟨model⟩)")
    return tensors


def _lazy(theirs: str, parts: Sequence[LazyTensor], merge: Merge, origin: str) -> LazyTensor:
    try:
        shape = tuple(merge([torch.empty(part.shape, dtype=part.dtype, device="meta") for part in parts]).shape)
    except RuntimeError:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise SpecError(theirs, f"of {shapes} in {origin} does not fit the model", "name the right ⟨model⟩") from None
    return LazyTensor(shape, parts[0].dtype, lambda: merge([part.read() for part in parts]))


def _source(name: str, model: Model) -> tuple[list[str], Merge]:
    """A tensor's possible names in Megatron-LM, and how to merge the ranks' parts."""
    module, _, kind = name.rpartition(".")
    inside, inner = "", module
    if name.startswith("layers."):
        _, index, inner = module.split(".", 2)
        inside = f"decoder.layers.{index}."
    vocabulary: Merge = partial(_rows, first=model.vocab)
    columns: Merge = partial(torch.cat, dim=1) if kind == "weight" else _equal
    heads = {which: partial(_of_groups, which=which, model=model) for which in ("query", "key", "value")}
    modules: dict[str, tuple[Merge, str]] = {
        "embedding": (vocabulary, "embedding.word_embeddings"),
        "position_embedding": (_equal, "embedding.position_embeddings"),
        "norm": (_equal, "decoder.final_layernorm"),
        "head": (vocabulary, "output_layer"),
        **{f"attention.{which}": (merge, "self_attention.linear_qkv") for which, merge in heads.items()},
        "attention.output": (columns, "self_attention.linear_proj"),
        "attention.query_norm": (_equal, "self_attention.q_layernorm"),
        "attention.key_norm": (_equal, "self_attention.k_layernorm"),
        "mlp.gate": (partial(_half, second=False), "mlp.linear_fc1"),
        "mlp.up": (partial(_half, second=True) if model.gated else _rows, "mlp.linear_fc1"),
        "mlp.down": (columns, "mlp.linear_fc2"),
        "attention_norm": (_equal, "input_layernorm"),
        "mlp_norm": (_equal, "pre_mlp_layernorm"),
    }
    if inner not in modules:
        raise SpecError(inner, "has no place in a Megatron-LM folder", "convert it with its own tools")
    merge, theirs = modules[inner]
    names = [f"{inside}{theirs}.{kind}"]
    # Norms may be fused into the linear layer that follows them.
    fused = {"attention_norm": "self_attention.linear_qkv", "mlp_norm": "mlp.linear_fc1"}
    if inner in fused:
        names.append(f"{inside}{fused[inner]}.layer_norm_{kind}")
    return names, merge


def _rows(parts: Sequence[Tensor], first: int | None = None) -> Tensor:
    """Rows end to end; for a vocabulary only the ``first`` ones, without its padding."""
    return torch.cat(list(parts))[:first]


def _equal(parts: Sequence[Tensor]) -> Tensor:
    """A tensor that every rank holds in full."""
    if not parts[0].is_meta and any(not torch.equal(part, parts[0]) for part in parts[1:]):
        raise SpecError("", "tensor ranks that should hold the same differ", "copy the checkpoint again")
    return parts[0]


def _half(parts: Sequence[Tensor], second: bool) -> Tensor:
    """The gate's or the up projection's half: every rank stores its part of the one above its part of the other."""
    return torch.cat([torch.unflatten(part, 0, (2, -1))[int(second)] for part in parts])


def _of_groups(parts: Sequence[Tensor], which: str, model: Model) -> Tensor:
    """Query, key or value rows: each group of heads stores its queries, then its key, then its value."""
    queries = model.heads // model.key_value_heads
    rows = torch.unflatten(torch.cat(list(parts)), 0, (model.key_value_heads, queries + 2, model.head_size))
    chosen = {"query": slice(0, queries), "key": slice(queries, queries + 1), "value": slice(queries + 1, None)}
    return rows[:, chosen[which]].flatten(0, 2)

"""A framework's module and optimizer as fields of a job; what has no price is refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.integrations.tuning import NotPriced, tuning_fields
from shardwise.interop.huggingface import model_from_hf_config
from shardwise.interop.jobs import model_from
from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count
from shardwise.spec.units import readable_count

# Attributes in which frameworks' wrappers keep the module.
_WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod")
_TRAINED_HEADS = ("ForCausalLM", "LMHeadModel")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "dropout")
_SIXTEEN_BIT = ("bfloat16", "float16")
# Optimizers by the name of their class, in lower case.
_OPTIMIZERS = {
    "adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "adamw8bit": "adam8bit",
    "adam8bit": "adam8bit", "pagedadamw8bit": "adam8bit", "pagedadam8bit": "adam8bit", "muon": "muon",
}  # fmt: skip
_UNLIKE = 0.02  # of the parameters: more than the position rows and scales that a description may leave out


@dataclass(frozen=True)
class ModuleFacts:
    """What a module determines of a job."""

    model: Model
    weights: str  # format: float32, bfloat16 or float16
    recomputed: bool
    attention: str  # as in a job: flash or unfused
    dropout: bool
    compiled: bool
    returns_keys: bool  # returns the keys and values of all layers together with the loss
    tuning: Mapping[str, Any] = field(default_factory=dict)  # fields of the training; none if all weights are trained
    notes: tuple[str, ...] = ()


def module_facts(module: nn.Module, given: Any = None) -> ModuleFacts:
    """``given`` (a preset, file, mapping or `Model`) describes a model that has no Hugging Face config."""
    network = language_model(module)
    config = getattr(network, "config", None)
    model = _described(module) if given is None else model_from(given)
    notes = _differences(network, config, model)
    weights = _weights(network)
    attention = str(getattr(config, "_attn_implementation", None) or "sdpa")
    if attention not in ("eager", "sdpa", "flex_attention") and "flash" not in attention:
        notes.append(f"attention {attention!r} is priced as FlashAttention")
    layers = list(module.modules())
    recomputed = bool(getattr(network, "is_gradient_checkpointing", False))
    return ModuleFacts(
        model,
        weights,
        recomputed=recomputed or any(type(layer).__name__ == "CheckpointWrapper" for layer in layers),
        attention="unfused" if attention == "eager" else "flash",
        dropout=any(_is_positive(getattr(config, name, 0)) for name in _DROPOUTS),
        compiled=any(hasattr(layer, "_orig_mod") for layer in layers),
        returns_keys=bool(getattr(config, "use_cache", False))
        and not recomputed,  # transformers does not combine the two
        tuning=tuning_fields(network, config),
        notes=tuple(notes),
    )


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of DDP, FSDP, DeepSpeed and `torch.compile`."""
    for name in _WRAPPERS:
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module) and (name != "module" or _is_wrapper(module)):
            return unwrapped(inner)
    return module


def language_model(module: nn.Module) -> nn.Module:
    """The only network with a Hugging Face config in a module; the module itself if there is none, or several."""
    own = unwrapped(module)
    networks = list(_configured(own))
    return networks[0] if len(networks) == 1 else own


def _configured(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that have a Hugging Face config."""
    if hasattr(getattr(module, "config", None), "model_type") and hasattr(module.config, "to_dict"):
        yield module
        return
    for child in module.children():
        yield from _configured(unwrapped(child))


def _is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper's attribute: a network may use that name for a part of its own."""
    return type(module).__name__ in ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")


def _described(module: nn.Module) -> Model:
    own = unwrapped(module)
    networks = list(_configured(own))
    remedy = "describe the model: model=, a preset, a config.json or a mapping of its fields"
    if len(networks) != 1:
        said = f"{len(networks)} networks with a Hugging Face config" if networks else "no Hugging Face config"
        raise NotPriced("model", f"{type(own).__name__} has {said}", remedy)
    network: Any = networks[0]
    name = type(network).__name__
    if not any(name.endswith(head) for head in _TRAINED_HEADS):
        raise NotPriced("model", f"the head of {name} is not that of a language model", remedy)
    try:
        return model_from_hf_config(network.config.to_dict())
    except SpecError as error:
        raise NotPriced(f"model: {error.field}".rstrip(": "), error.problem, error.remedy or remedy) from None


def _differences(network: nn.Module, config: Any, model: Model) -> list[str]:
    """Raises NotPriced for layers on several devices; notes on what differs."""
    if len(set(map(str, (getattr(network, "hf_device_map", None) or {}).values()))) > 1:
        raise NotPriced("model", "layers on several devices of one process (device_map) are not priced", "use FSDP")
    if getattr(config, "quantization_config", None) is not None:
        return []  # two codes in a byte
    every = sum(_size(parameter) for name, parameter in network.named_parameters() if ".lora_" not in name)
    described = parameter_count(model)
    if _is_flat(network) or abs(every / described - 1) < _UNLIKE:
        return []
    there = f"the module has {readable_count(every)} parameters"
    return [f"{there}, what is priced has {readable_count(described)}: {model.name}"]


def _size(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, of which DeepSpeed's ZeRO-3 leaves an empty one."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _is_flat(network: nn.Module) -> bool:
    """Whether FSDP1 has replaced the parameters by shards of flat ones, whose sizes say nothing."""
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in network.modules())


def _weights(network: nn.Module) -> str:
    """The format of the weights that are trained."""
    counted: dict[str, int] = {}
    for parameter in filter(lambda parameter: parameter.requires_grad, network.parameters()):
        name = str(parameter.dtype).removeprefix("torch.")
        counted[name] = counted.get(name, 0) + _size(parameter)
    usual = max(counted, key=lambda name: counted[name], default="float32")
    if usual not in ("float32", *_SIXTEEN_BIT):
        raise NotPriced("model", f"weights in {usual} are not priced", "train 16-bit or fp32 weights")
    return usual


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


# -- optimizers ------------------------------------------------------------------------------------------------------


def optimizer_of(optimizer: Any, *, narrow: bool = False) -> str:
    """A job's name for an optimizer; ``narrow``: it updates 16-bit weights, and its states are 16-bit too."""
    inner, name = optimizer, ""
    while inner is not None:
        name = type(inner).__name__
        if name.lower() in (*_OPTIMIZERS, "sgd"):
            break
        inner = getattr(inner, "optimizer", None)
    if inner is None:
        problem = f"the states of {type(optimizer).__name__} are not priced"
        raise NotPriced("optimizer", problem, f"priced are SGD, {', '.join(sorted(set(_OPTIMIZERS.values())))}")
    if name.lower() == "sgd":
        momentum = any(group.get("momentum") for group in inner.param_groups)
        kind = "sgd-momentum" if momentum else "sgd"
    else:
        kind = _OPTIMIZERS[name.lower()]
    if not narrow or kind in ("sgd", "adam8bit"):
        return kind
    if kind == "adamw":
        return "adamw-bf16-moments"
    raise NotPriced("optimizer", f"{name} with 16-bit states is not priced", "train fp32 weights in mixed precision")


# -- sequences -------------------------------------------------------------------------------------------------------

_LOOKED_AT = 64  # examples


@dataclass(frozen=True)
class Sequences:
    """The length of an example, as it is priced."""

    seq: int
    said_by: str = field(compare=False)  # where the length comes from, in words


def sequences_of(given: int | None, loader: Any, *settings: Any) -> Sequences:
    """The given length, or a trainer's setting (``max_length``), or that of the examples if all are equally long."""
    if given is not None:
        return Sequences(given, "given")
    for setting in settings:
        for name in ("max_length", "max_seq_length"):
            value = getattr(setting, name, None)
            if isinstance(value, int) and value > 0:
                return Sequences(value, f"{name} of {type(setting).__name__}")
    lengths = sorted(set(_lengths(getattr(loader, "dataset", loader))))
    if len(lengths) == 1:
        return Sequences(lengths[0], "the examples of the data set")
    if not lengths:
        raise SpecError("seq", "is not given, and the data do not say it", "give seq=, the tokens of a padded example")
    problem = f"is not given, and examples have {lengths[0]:,} to {lengths[-1]:,} tokens"
    raise SpecError("seq", problem, "give seq=, the tokens of a padded example")


def _lengths(dataset: Any) -> Iterator[int]:
    """The lengths of examples spread over a data set; none if it cannot be indexed."""
    try:
        count = len(dataset)
        places = range(0, count, max(1, count // _LOOKED_AT))
        examples = [dataset[place] for place in places[:_LOOKED_AT]] if hasattr(type(dataset), "__getitem__") else []
    except (TypeError, NotImplementedError):  # a stream
        return
    for example in examples:
        tokens = example
        if hasattr(example, "keys"):
            tokens = example["input_ids"] if "input_ids" in example else None  # noqa: SIM401 (not only a dict)
        elif isinstance(example, (tuple, list)) and example and not isinstance(example[0], int):
            tokens = example[0]
        if tokens is None or not hasattr(tokens, "__len__") or getattr(tokens, "ndim", 1) != 1:
            return
        yield len(tokens)

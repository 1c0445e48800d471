"""The process that counts a network of transformers: ``python -m ...huggingface.counting``, JSON in and out.

The network is built on the meta device from its configuration by the code that is installed: nothing is fetched, no
code of a model's publisher runs, no weight is made. Its parameters are counted. Its forward pass is traced, once for
each kind of layer, by torch's counter of FLOPs at two lengths: what grows with the length is attention that hides its
queries and keys; all other attention is handed the function below, which notes its heads.

A configuration is whatever somebody wrote. So the process has limits of memory and of processor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.spec.files import parse_json

MEMORY_BYTES = 6 * 2**30  # beyond what the process has once its libraries are there
TRACE_SECONDS, MOST_SECONDS = 40, 120  # of processor time
LENGTHS = (256, 512, 768)  # evenly apart, and multiples of the chunks in which states are passed on
_ATTENTION = "counted"
# What the installed code, and not the configuration, decides.
_NOT_TAKEN = ("auto_map", "quantization_config", "torch_dtype", "dtype", "attn_implementation",
              "experts_implementation", "transformers_version", "architectures", "model_type")  # fmt: skip
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k",
          "num_selected_experts", "experts_per_token")  # fmt: skip
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class NotCounted(Exception):
    """What cannot be counted, in words for the reader of the configuration."""


def main() -> None:
    """Reads a configuration from standard input and writes what was counted, or a problem."""
    try:
        import transformers  # noqa: F401 (its memory is not the network's)

        _bound_this_process()
        answer = counts(parse_json(sys.stdin.read(), "config"))
    except NotCounted as error:
        answer = {"problem": str(error)}
    except MemoryError:
        answer = {"problem": f"its network needs more than {MEMORY_BYTES >> 30} GiB to be described"}
    except Exception as error:  # whatever the installed code makes of these values
        answer = {"problem": f"transformers does not take it: {_one_line(error)}"}
    sys.stdout.write(json.dumps(answer) + "\n")


def _one_line(error: BaseException) -> str:
    lines = [line.strip().rstrip(":") for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[-2:])[:200] or type(error).__name__


def counts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the network of a configuration has and computes."""
    import transformers

    described = _described(config)
    network = _network(described)
    counted = _parameters(network)
    return {
        **counted,
        **_traced(network),
        **_shape(network.config, network),
        "code": type(network).__name__,
        "version": transformers.__version__,
    }


def _bound_this_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that asks
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or already less
        held = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, resource.RLIM_INFINITY))


# -- the network -------------------------------------------------------------------------------------------------


def _described(config: Mapping[str, Any]) -> Any:
    """The configuration of the decoder, as an object of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type, inner = config.get("model_type"), config.get("text_config")
    if model_type not in CONFIG_MAPPING:
        if isinstance(inner, Mapping) and inner.get("model_type") in CONFIG_MAPPING:
            return _described(inner)
        own = "it has code of its own (auto_map), which is not run, and " if "auto_map" in config else ""
        raise NotCounted(f"{own}the installed transformers does not know it")
    given = {key: _decoded(value) for key, value in config.items() if key not in _NOT_TAKEN and not key.startswith("_")}
    described = CONFIG_MAPPING[model_type].from_dict(given)
    if getattr(described, "is_encoder_decoder", False):
        raise NotCounted("it is an encoder and a decoder, and only decoders are priced")
    return described


def _decoded(value: Any) -> Any:
    """Numbers that JSON cannot express, as transformers writes them."""
    if isinstance(value, Mapping):
        return (
            float(value["__float__"]) if value.keys() == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
        )
    return [_decoded(one) for one in value] if isinstance(value, list) else value


def _network(described: Any) -> Any:
    """The decoder with its head on the meta device, or without where transformers has it as a part of another."""
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
    inner = described.get_text_config(decoder=True)
    whole = _has_decoder_of_its_own(described)
    if type(inner) in MODEL_FOR_CAUSAL_LM_MAPPING or whole:
        built_by: Any = AutoModelForCausalLM
    elif type(inner) in MODEL_MAPPING:
        built_by = AutoModel
    else:
        raise NotCounted("transformers has no decoder of it")
    build = partial(built_by.from_config, described if whole else inner, experts_implementation="batched_mm")
    with torch.device("meta"):
        try:
            network = build(attn_implementation=_ATTENTION)
        except (ValueError, KeyError):  # attention of its own
            network = build(attn_implementation="eager")
    return network.eval()


def _has_decoder_of_its_own(described: Any) -> bool:
    """Whether a configuration of more than a decoder is what transformers builds the decoder alone of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    network = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(described), None)
    inner = described.sub_configs.get("text_config")
    return network is not None and inner is not None and network.config_class is inner


def _layers(network: nn.Module) -> list[list[nn.Module]]:
    """Each layer as the modules that it consists of: those of all outermost lists as long as the largest."""
    lists = [list(one) for one in _outermost(network) if len(one)]
    if not lists:
        raise NotCounted("its code has no list of layers")
    longest = max(
        lists, key=lambda modules: sum(parameter.numel() for one in modules for parameter in one.parameters())
    )
    return [list(parts) for parts in zip(*(one for one in lists if len(one) == len(longest)))]


def _outermost(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        elif isinstance(child, nn.ModuleDict):
            yield nn.ModuleList(child.values())
        else:
            yield from _outermost(child)


# -- parameters ----------------------------------------------------------------------------------------------------


def _parameters(network: nn.Module) -> dict[str, Any]:
    """Of every layer its weights in experts, other matrices and vectors; and all of the network."""
    seen: set[int] = set()
    layers = [_of_layer(parts, seen) for parts in _layers(network)]
    everything = {id(parameter): parameter.numel() for parameter in network.parameters()}
    return {"parameters": sum(everything.values()), "layers": layers}


def _of_layer(parts: list[nn.Module], seen: set[int]) -> dict[str, int]:
    numbers = {"matrices": 0, "vectors": 0, "in_experts": 0, "experts": 0}
    for part in parts:
        modules = dict(part.named_modules())
        for name, parameter in part.named_parameters():
            experts = _experts_of(name, parameter, modules)
            numbers["experts"] = max(numbers["experts"], experts)
            if id(parameter) in seen:  # used by an earlier layer too
                continue
            seen.add(id(parameter))
            kind = "in_experts" if experts else ("matrices" if parameter.dim() > 1 else "vectors")
            numbers[kind] += parameter.numel()
    return numbers


def _experts_of(name: str, parameter: Tensor, modules: Mapping[str, nn.Module]) -> int:
    """How many experts a parameter is a part of or holds; 0 if none."""
    words = name.split(".")
    for end, word in enumerate(words[:-1], 1):
        if "expert" not in word or "shared" in word:
            continue
        holder = modules[".".join(words[:end])]
        if isinstance(holder, (nn.ModuleList, nn.ModuleDict)):
            return len(holder)
        stacked = getattr(holder, "num_experts", None)
        if parameter.dim() >= 2 and parameter.shape[0] == (stacked or (parameter.dim() == 3 and parameter.shape[0])):
            return int(parameter.shape[0])
    return 0


def _holders(layer: nn.Module) -> set[nn.Module]:
    """The modules that compute experts: all of them, or each."""
    modules, found = dict(layer.named_modules()), set[nn.Module]()
    for name, parameter in layer.named_parameters():
        if _experts_of(name, parameter, modules):
            words = name.split(".")
            end = next(end for end, word in enumerate(words, 1) if "expert" in word and "shared" not in word)
            holder = modules[".".join(words[:end])]
            if isinstance(holder, (nn.ModuleList, nn.ModuleDict)):
                holder = modules[".".join(words[: end + 1])]
            found.add(holder)
    return found


# -- a forward pass ------------------------------------------------------------------------------------------------

_calls: list[tuple[int, int, int, int, int]] = []
"""Heads, key-value heads, features of a query and of a value, and window (0: none) of each attention."""


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """In place of attention: notes its shape."""
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    window = window if isinstance(window, int) and window > 0 else 0
    _calls.append((query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], window))
    batch, heads, tokens = query.shape[:3]
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


class _Traced:
    """A forward pass that runs one layer of each kind; layers like it return what it did.

    FLOPs of experts are left out: some code runs all of them on every token, some needs to know the chosen ones.
    """

    def __init__(self, network: Any, masked: bool) -> None:
        self.network, self.masked, self.counter = network, masked, FlopCounterMode(display=False)
        self.known: dict[Any, tuple[Any, float, list[Any]]] = {}
        self.besides, self.attention = 0.0, list[Any]()  # FLOPs of repeated layers, less those of experts

    def flops(self, tokens: int) -> float:
        """Those of so many tokens; `attention` has all calls afterwards."""
        kept = []
        for part in chain.from_iterable(_layers(self.network)):
            experts = _holders(part)
            kind = _kind(part)
            for module, run in ((part, self._once(kind, part)), *((one, self._left_out(one)) for one in experts)):
                if "forward" not in vars(module):
                    module.forward = run
                    kept.append(module)
        try:
            with torch.no_grad(), self.counter:
                words = torch.zeros(1, tokens, dtype=torch.long, device="meta")
                mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta") if self.masked else None
                self.network(input_ids=words, attention_mask=mask, use_cache=False)
        finally:
            for module in kept:
                del module.forward
            self.attention += _calls
            _calls.clear()
        return self._counted()

    def _counted(self) -> float:
        return float(self.counter.get_total_flops()) + self.besides

    def _once(self, kind: Any, layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        def run(*arguments: Any, **options: Any) -> Any:
            if kind in self.known:
                output, flops, calls = self.known[kind]
                self.besides += flops
                self.attention += calls
                return output
            before, first = self._counted(), len(_calls)
            output = forward(*arguments, **options)
            self.known[kind] = output, self._counted() - before, _calls[first:]
            return output

        return run

    def _left_out(self, experts: nn.Module) -> Callable[..., Any]:
        forward = experts.forward

        def run(*arguments: Any, **options: Any) -> Any:
            before = self._counted()
            output = forward(*arguments, **options)
            self.besides -= self._counted() - before
            return output

        return run


def _kind(layer: nn.Module) -> Any:
    """What layers that compute the same have in common."""
    return tuple(
        (name, type(module), tuple((key, tuple(one.shape)) for key, one in module.named_parameters(recurse=False)),
         tuple((key, value) for key, value in sorted(vars(module).items())
               if isinstance(value, (bool, int, float, str)) and "layer" not in key and "idx" not in key))
        for name, module in layer.named_modules()
    )  # fmt: skip


def _traced(network: Any) -> dict[str, Any]:
    """FLOPs of a token's forward pass without experts, and its attention: as noted, and as FLOPs of a token and key."""
    signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, TRACE_SECONDS)
    problem = ""
    for masked in (False, True):  # some code makes no mask on the meta device, some needs one
        passes = [_Traced(network, masked) for _ in LENGTHS]
        try:
            first, second, third = (one.flops(tokens) for one, tokens in zip(passes, LENGTHS))
        except Exception as error:  # code that asks for values, which tensors on the meta device do not have
            problem = problem or _one_line(error)
            continue
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # FLOPs of s tokens are c + a·s + b·s²: c of tables, a of matrices, b of attention.
        step = LENGTHS[1] - LENGTHS[0]
        of_a_key = max(0.0, (third - 2 * second + first) / (2 * step * step))
        of_a_token = (second - first) / step - of_a_key * (LENGTHS[0] + LENGTHS[1])
        return {"flops": of_a_token, "flops_of_a_key": of_a_key, "attention": passes[0].attention}
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {"not_traced": problem}


def _stop(*_: Any) -> None:
    raise TimeoutError(f"its forward pass takes more than {TRACE_SECONDS} s to trace")


# -- the shape -------------------------------------------------------------------------------------------------------


def _shape(described: Any, network: Any) -> dict[str, Any]:
    """What a description of the network says: its sizes, as its code and its configuration have them."""
    words = network.get_input_embeddings().weight
    head = getattr(network.get_output_embeddings(), "weight", None)
    names = [type(module).__name__.lower() for module in network.modules()]
    inner = [name for name, _ in network.named_parameters()]
    layers = _layers(network)
    hidden = _whole(described, "hidden_size") or words.shape[1]
    normed = [
        one.numel() for name, one in network.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight"))
    ]
    latent = {name: _whole(described, name) for name in (*_LATENT, "q_lora_rank")}
    return {
        "vocab": words.shape[0],
        "hidden": hidden,
        "tied": head is words if head is not None else bool(getattr(described, "tie_word_embeddings", False)),
        "without_head": head is None,
        "heads": _whole(described, "num_attention_heads"),
        "key_value_heads": _whole(described, "num_key_value_heads"),
        "top_k": next(filter(None, (_whole(described, name) for name in _TOP_K)), None),
        "max_seq": _whole(described, "max_position_embeddings"),
        "gated": any("gate_proj" in name or "gate_up" in name or "w3." in name for name in inner),
        "norms": round(sum(_norms_of(parts, hidden) for parts in layers) / len(layers)),
        "normed_queries": max(normed, default=0),
        "rms": any("rmsnorm" in name for name in names),
        "rotary": any("rotary" in name for name in names),
        "latent": latent if all(latent[name] for name in _LATENT) else None,
    }


def _norms_of(parts: list[nn.Module], hidden: int) -> int:
    """How many norms of hidden states a layer has."""
    modules = (module for part in parts for module in part.modules() if "norm" in type(module).__name__.lower())
    weights = (getattr(module, "weight", None) for module in modules)
    return sum(weight is not None and weight.shape == (hidden,) for weight in weights)


def _whole(described: Any, name: str) -> int | None:
    value = getattr(described, name, None)
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, int) for one in value):
        value = max(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {"USE_HUB_KERNELS": "0", "OMP_NUM_THREADS": "1"}
    warnings.simplefilter("ignore")
    main()

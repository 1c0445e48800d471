"""What of a model is trained, beside which frozen weights, towards what, and on sequences of which lengths."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from shardwise.spec.codec import Spec, count, setting
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.layers import MOST_LAYERS
from shardwise.spec.model import Matrix, MatrixRole, Model

_R = MatrixRole
_ATTENTION = (_R.QUERY, _R.KEY, _R.VALUE, _R.ATTENTION_OUTPUT, _R.QUERY_DOWN, _R.QUERY_UP)
_STATES = (_R.STATE_INPUTS, _R.STATE_RATES, _R.STATE_OUTPUT)
_LINEAR = (*_ATTENTION, *_STATES, _R.KEY_VALUE_DOWN, _R.KEY_VALUE_UP, _R.GATE, _R.UP, _R.DOWN)
# The names that transformers gives the linear layers of its models (`modeling_*.py`), and what each is here. A fused
# projection stands for its parts.
TARGETS: dict[str, tuple[MatrixRole, ...]] = {
    "all-linear": _LINEAR,  # every linear layer but the head, as PEFT's word says; routers are not linear layers there
    "attention": tuple(role for role in _LINEAR if role not in (_R.GATE, _R.UP, _R.DOWN)),
    "mlp": (_R.GATE, _R.UP, _R.DOWN),
    "q_proj": (_R.QUERY,),
    "k_proj": (_R.KEY,),
    "v_proj": (_R.VALUE,),
    "o_proj": (_R.ATTENTION_OUTPUT,),
    "gate_proj": (_R.GATE,),
    "up_proj": (_R.UP,),
    "down_proj": (_R.DOWN,),
    "qkv_proj": (_R.QUERY, _R.KEY, _R.VALUE),
    "query_key_value": (_R.QUERY, _R.KEY, _R.VALUE),
    "linear_qkv": (_R.QUERY, _R.KEY, _R.VALUE),
    "linear_proj": (_R.ATTENTION_OUTPUT,),
    "gate_up_proj": (_R.GATE, _R.UP),
    "linear_fc1": (_R.GATE, _R.UP),
    "linear_fc2": (_R.DOWN,),
    "dense_h_to_4h": (_R.UP,),
    "dense_4h_to_h": (_R.DOWN,),
    "q_a_proj": (_R.QUERY_DOWN,),
    "q_b_proj": (_R.QUERY_UP,),
    "kv_a_proj_with_mqa": (_R.KEY_VALUE_DOWN,),
    "kv_b_proj": (_R.KEY_VALUE_UP,),
}


@dataclass(frozen=True, kw_only=True)
class Adapters(Spec):
    """Two narrow matrices beside each frozen linear layer, trained in its place: LoRA (Hu et al. 2021, arXiv
    2106.09685) or DoRA (Liu et al. 2024, arXiv 2402.09353)."""

    method: Literal["lora", "dora"] = "lora"
    """`lora` adds a product of two narrow matrices; `dora` also trains the length of each row of their sum."""
    rank: int = count(16, maximum=4096)
    """Width of the two matrices."""
    alpha: float = setting(32.0, above=0)
    """Their product is scaled by `alpha` / `rank`."""
    scaling: Literal["standard", "rank-stabilised"] = "standard"
    """`rank-stabilised` divides `alpha` by the root of `rank` (Kalajdzievski 2023, arXiv 2312.03732)."""
    dropout: float = setting(0.0, minimum=0, maximum=0.99)
    """Share of their inputs that are dropped."""
    targets: tuple[str, ...] = setting(("all-linear",), words=tuple(TARGETS))
    """Linear layers that have them, by the names of `transformers`: `q_proj`, `down_proj`; or `attention`, `mlp`,
    `all-linear`."""
    experts: bool = False
    """Routed experts have them too, each its own."""
    layers: tuple[int, ...] = ()
    """Layers that have them; by default all."""

    def check(self) -> None:
        if not self.targets:
            raise SpecError("targets", "is empty", "use [all-linear]")
        for index, name in enumerate(self.targets):
            if name not in TARGETS:
                raise SpecError(
                    f"targets[{index}]", f"{shown(name)} is not a linear layer", nearest_name(name, TARGETS)
                )
        for index, layer in enumerate(self.layers):
            if not 0 <= layer < MOST_LAYERS:
                raise SpecError(f"layers[{index}]", f"{layer} is not a layer", "count layers from 0")

    @cached_property
    def roles(self) -> frozenset[MatrixRole]:
        return frozenset(role for name in self.targets for role in TARGETS[name])

    @property
    def factor(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / (self.rank if self.scaling == "standard" else self.rank**0.5)

    def adapts(self, matrix: Matrix) -> bool:
        return matrix.role in self.roles

    def adapts_layer(self, layer: int) -> bool:
        return not self.layers or layer in self.layers

    def parameters(self, matrix: Matrix, tensor_parallel: int = 1) -> float:
        """Trained parameters beside one matrix on a rank: A (`rank` × inputs), B (outputs × `rank`), DoRA's lengths.

        Tensor parallelism cuts the side that it cuts of the matrix: A if row-parallel, B if column-parallel.
        """
        if not self.adapts(matrix):
            return 0.0
        share = matrix.share(tensor_parallel)
        inputs = matrix.inputs * (share if matrix.split == "row" else 1.0)
        outputs = matrix.outputs * (share if matrix.split == "column" else 1.0)
        return self.rank * (inputs + outputs) + (outputs if self.method == "dora" else 0.0)


@dataclass(frozen=True)
class BaseFormat:
    """How frozen linear layers are kept."""

    name: str
    bytes: float | None  # of a weight, its part of the scales included; None: as the precision recipe keeps weights
    source: str

    @property
    def quantised(self) -> bool:
        """Whether a weight is made from codes and scales before each use."""
        return self.bytes is not None and self.bytes < 2


NF4_BLOCK = 64  # weights that share a scale
_NF4 = "Dettmers et al. 2023 (QLoRA, arXiv 2305.14314) section 3; bitsandbytes functional.py"
BASE_FORMATS: dict[str, BaseFormat] = {
    format.name: format
    for format in (
        BaseFormat("computed", None, "the same as a trained weight"),
        BaseFormat("bf16", 2.0, "no fp32 copy"),
        BaseFormat("fp8", 1 + 4 / 128**2, "an fp32 scale per 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3)"),
        BaseFormat("int8", 1.0, "an fp32 scale per row of outputs (LLM.int8(), arXiv 2208.07339, vector-wise)"),
        BaseFormat("nf4", 0.5 + 4 / 64, f"an fp32 scale per 64: {_NF4}"),
        BaseFormat("nf4-double", 0.5 + 1 / 64 + 4 / (64 * 256), f"8-bit scales, an fp32 scale per 256 of them: {_NF4}"),
    )
}  # fmt: skip
BasePrecision = Literal["computed", "bf16", "fp8", "int8", "nf4", "nf4-double"]

Part = Literal["embedding", "attention", "mlp", "experts", "router", "norms", "head"]
PARTS: tuple[Part, ...] = get_args(Part)
PARTS_OF_LAYERS: tuple[Part, ...] = ("attention", "mlp", "experts", "router", "norms")
_PATTERN = re.compile(r"(?:layers(?:\.(\d+)(?:-(\d+))?)?(?:\.([a-z]+))?|([a-z]+))")


@dataclass(frozen=True)
class TrainedPattern:
    """One entry of `training.trained`."""

    part: Part | None
    """None: every part of its layers."""
    first: int = 0
    last: int = MOST_LAYERS
    layers_only: bool = False
    """Whether it leaves out the final norm and the ends of the model."""

    @classmethod
    def of(cls, text: str, path: str) -> TrainedPattern:
        """The pattern that ``text`` writes: a part, `layers.28-31`, or `layers.28-31.attention`."""
        match = _PATTERN.fullmatch(text)
        part = match and (match.group(3) or match.group(4))
        inside = match is not None and match.group(4) is None
        if match is None or (part is not None and part not in (PARTS_OF_LAYERS if inside else PARTS)):
            names = ", ".join(PARTS)
            raise SpecError(path, f"{shown(text)} names no part", f"use {names}, layers.0-3 or layers.0-3.norms")
        first, last = match.group(1), match.group(2) or match.group(1)
        if first is not None and int(last) < int(first):
            raise SpecError(path, f"{shown(text)} ends before it begins", f"use layers.{last}-{first}")
        bounds = (int(first), int(last)) if first is not None else (0, MOST_LAYERS)
        return cls(part, *bounds, layers_only=inside)

    def matches(self, part: Part, layer: int | None) -> bool:
        """Whether a part is trained; ``layer`` is None for what is in no layer."""
        if self.part not in (None, part) or (layer is None and self.layers_only):
            return False
        return layer is None or self.first <= layer <= self.last


@dataclass(frozen=True)
class Tuning:
    """What of a model is trained, and how the rest is kept: what counts, prices, checkpoints and the engine read."""

    adapters: Adapters | None = None
    patterns: tuple[TrainedPattern, ...] = ()
    base: BaseFormat = BASE_FORMATS["computed"]
    of_layers: frozenset[int] | None = None
    """The layers that shares are of, such as those of a stage; None: all."""

    def over(self, layers: Iterable[int] | None) -> Tuning:
        """The same, with shares of some layers, or of all."""
        return replace(self, of_layers=None if layers is None else frozenset(layers))

    def meant(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Those of some layers that shares are of."""
        return tuple(layers if self.of_layers is None else (layer for layer in layers if layer in self.of_layers))

    @property
    def everything(self) -> bool:
        """Whether nothing is frozen."""
        return self.adapters is None and not self.patterns

    def trains(self, part: Part, layer: int | None = None) -> bool:
        """Whether the own weights of a part are trained, in one layer or, with None, of what is in no layer."""
        return self.everything or any(pattern.matches(part, layer) for pattern in self.patterns)

    def trained_share(self, part: Part, layers: Iterable[int]) -> float:
        """The share of some layers whose ``part`` is trained."""
        if self.everything:
            return 1.0
        layers = self.meant(layers)
        return sum(self.trains(part, layer) for layer in layers) / max(1, len(layers))

    def adapted_share(self, layers: Iterable[int]) -> float:
        """The share of some layers that have adapters."""
        if self.adapters is None:
            return 0.0
        layers = self.meant(layers)
        return sum(map(self.adapters.adapts_layer, layers)) / max(1, len(layers))

    def trains_in(self, layer: int) -> bool:
        """Whether anything in a layer is trained."""
        adapted = self.adapters is not None and self.adapters.adapts_layer(layer)
        return adapted or any(self.trains(part, layer) for part in PARTS_OF_LAYERS)

    def first_trained(self, model: Model) -> int | None:
        """The layer below which no gradient flows: -1 with a trained embedding, None if only the ends are trained."""
        if self.trains("embedding"):
            return -1
        return next((layer for layer in range(model.layers + model.mtp_layers) if self.trains_in(layer)), None)

    def kind_of(self, layer: int, model: Model) -> tuple[bool, ...]:
        """Equal for layers that are tuned alike: what of them is trained, and whether a gradient flows through them."""
        first = self.first_trained(model)
        flows = first is not None and layer >= first
        adapted = self.adapters is not None and self.adapters.adapts_layer(layer)
        return flows, adapted, *(self.trains(part, layer) for part in PARTS_OF_LAYERS)


EVERYTHING = Tuning()
NOTHING = Tuning(patterns=(TrainedPattern(None, 0, -1, layers_only=True),))


@dataclass(frozen=True, kw_only=True)
class Preference(Spec):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    beta: float = setting(0.1, above=0)
    """How strongly the policy is held to its reference."""
    reference: Literal["auto", "copy", "adapters-off"] = "auto"
    """Where the frozen reference is: a second `copy` of the model, or the same weights with `adapters-off`; `auto`: the
    latter where only adapters are trained."""
    label_smoothing: float = setting(0.0, minimum=0, maximum=0.5)
    """Share of the pairs whose order is assumed to be wrong."""

"""What the words in a table mean: machine, precision, recompute, schedule, sharding, context parallelism, units.

Tables name one thing in many ways; every reader here accepts all of them, and returns None
for an empty cell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.interop.frameworks import maxtext
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.network import Link, NetworkLevel
from shardwise.spec.schedules import job_schedules


def _first(named: Sequence[tuple[str, str]], text: str) -> str | None:
    """What the first pattern that is found in ``text`` stands for."""
    return next((name for name, pattern in named if re.search(pattern, text)), None)


_PRECISIONS = (
    ("nvfp4", "fp4"),
    ("int8", "^int8"),
    ("mxfp8", r"mx-?fp8|fp8-?mx|\bmx"),
    ("fp8-rowwise", r"(fp8|float8|e4m3).*row-?wise"),
    ("fp8", "fp8|float8|e4m3"),
    ("fp32", "^(tf|fp|float)32"),
    ("fp16", "^((fp|float)16|half)"),
    ("bf16", "(bf16|16-bit) grad"),
    ("bf16-fp32-grads", "(fp|float)32 grad"),
)


def precision(text: str, fp32_gradients: bool) -> str:
    """The recipe that a cell names; ``fp32_gradients`` is what 16-bit training accumulates in unless it says."""
    usual = "bf16-fp32-grads" if fp32_gradients else "bf16"
    return _first(_PRECISIONS, text.lower().replace("_", "-")) or usual


_UNSAID = re.compile(r"(unknown|see |n/?a\b|not |\?|-|$)")
_OPERATORS = (
    ("attention", r"att"),
    ("up-projection", r"up.?proj"),
    ("activation", r"\b(moe.)?act\b|swiglu|gelu|act(ivation)?.?func"),
    ("norm", r"norm"),
    ("experts", r"\bmoe\b(?!-act)"),
)


# Tensors that MaxText's policies keep, on the device or the host; all others are made again.
_TENSORS = (
    (maxtext.INPUT, r"decoder-layer-input"),
    (maxtext.PROJECTIONS_IN, r"qkv-proj|q/k/v|query-proj"),
    (maxtext.PROJECTION_OUT, r"out-proj"),
    (maxtext.UP, r"mlpwi"),
)
_POLICIES: tuple[tuple[str, set[str]], ...] = (
    (r"save-dot-except-(logits-ffn1|mlp)|save-dot-with-context-except-mlp", maxtext.PROJECTIONS),
    (r"save-dot-except-logits|minimal", {*maxtext.PROJECTIONS, maxtext.UP}),
    (r"save-(qkv|out)-proj", set()),
)


def remat_policy(words: str, *, experts: bool) -> dict[str, Any] | None:
    """The fields of the strategy that are nearest to one of MaxText's policies, None where ``words`` name none."""

    def named(pattern: str) -> set[str]:
        match = re.search(pattern, words)
        return {tensor for tensor, name in _TENSORS if match and re.search(name, match[1])}

    policy = next((kept for pattern, kept in _POLICIES if re.search(pattern, words)), None)
    if policy is None and not re.search(r"^custom|offloaded to host", words):
        return None
    on_host = named(r"offload of ([^;]*)") | named(r"([^;,]*) offloaded")
    context = {maxtext.CONTEXT} if "context" in words else set()
    kept = {*(policy or ()), *on_host, *named(r"keep (.*?)(?:, remat|;|$)"), *context}
    return maxtext.recomputed(kept, input_on_host=maxtext.INPUT in on_host, experts=experts)


def recompute(text: str, precision_text: str, *, experts: bool = False) -> dict[str, Any] | None:
    """The fields of the strategy that a cell names; ``experts``: the model's MLPs are routed experts."""
    words = _of_this_precision(text.lower(), precision_text).replace("_", "-").strip()
    if _UNSAID.match(words):
        return None
    if policy := remat_policy(words, experts=experts):
        return policy
    if re.match(r"(no|none|off|false|0)\b", words):
        return {"recompute": "none"}
    if re.search(r"full|^(all|yes|on|true|1)\b|checkpoint", words) and "selective" not in words:
        block = re.search(r"block\D*(\d+)", words)
        return {"recompute": "full", **({"recompute_layers": int(block[1])} if block else {})}
    if re.search(r"per-?op|\bsac\b|alternate|every other|torchtitan", words):
        return {"recompute": "selective", "recompute_operators": ["alternate-products"]}
    named = [name for name, pattern in _OPERATORS if re.search(pattern, words)]
    if named or "selective" in words:
        return {"recompute": "selective", "recompute_operators": named or ["attention"]}
    return None


def _of_this_precision(text: str, precision_text: str) -> str:
    """Of "5 layers (FP8) / none (BF16)" the part for the row's own precision."""
    for part in text.split(" / "):
        named = re.findall(r"fp4|fp8|bf16", part)
        if named and any(name in precision_text.lower() for name in named):
            return part
    return text.split(" / ")[0]


def schedule(text: str) -> str | None:
    """The schedule that a cell names."""
    words = re.sub(r" (if|when) .*", "", text.lower()).strip()
    words = re.sub(r"^zb \(.*\)", "zb-h1", words)  # Primus: "zero-bubble" and "zbb" are the plain one
    if "interleav" in words or words.endswith(("-i", "vpp")):
        return "interleaved"
    squeezed = re.sub(r"[^a-z0-9]", "", words)
    return {re.sub(r"[^a-z0-9]", "", name): name for name in job_schedules()}.get(squeezed)


def zero(text: str) -> int | None:
    """The stage of ZeRO that a cell names."""
    words = text.lower()
    stage = re.search(r"zero.?(\d)", words) or re.match(r"\s*(\d)(?:\.0)?\b", words)
    if stage:
        return min(3, int(stage[1]))
    if re.search(r"[fh]sdp", words):
        return 3
    if "distributed" in words and "opt" in words:
        return 1
    return 0 if re.match(r"(none|no|ddp|off)\b", words) else None


def context_method(text: str) -> str | None:
    """How a note says that context parallelism runs."""
    match = re.search(r"cp ?= ?([a-z0-9-]+)|(ring|ulysses|all-?gather)[- ]?(?:attention )?cp", text.lower())
    words = (match[1] or match[2]) if match else ""
    methods = {"a": "ulysses", "u": "ulysses", "r": "ring", "p": "ring"}
    return "all-gather" if re.match(r"all-?gather", words) else methods.get(words[:1])


def latent_attention(text: str) -> dict[str, int]:
    """Its sizes, by a note like "MLA q-lora 192 kv-lora 64 qk 16+8 v 16"; else DeepSeek-V2's and V3's.

    Both have the same (arXiv 2405.04434, 2412.19437).
    """
    match = re.search(r"q-lora (\d+) kv-lora (\d+) qk (\d+)\+(\d+) v (\d+)", text)
    sizes = map(int, match.groups()) if match else (1536, 512, 128, 64, 128)
    return dict(zip(("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"), sizes))


def stage_layers(text: str) -> list[int] | None:
    """Layers of every stage by a note like "layout Et*3|(tt|)*6mL": Megatron's --pipeline-model-parallel-layout."""
    match = re.search(r"layout (\S+)", text)
    if not match:
        return None
    repeated = re.sub(r"\(([^)]*)\)\*(\d+)", lambda part: part[1] * int(part[2]), match[1].rstrip(";"))
    whole = re.sub(r"(\w)\*(\d+)", lambda part: part[1] * int(part[2]), repeated)
    return [stage.count("t") for stage in whole.split("|")]


def expert_tp(text: str, tp: int, ep: int) -> int:
    """Over how many ranks a note says that an expert is split.

    If it says nothing, 1; without expert parallelism ``tp``, as every other matrix of a layer.
    """
    match = re.search(r"expert tp (\d+)", text.lower())
    return int(match[1]) if match else (tp if ep == 1 else 1)


_CONVENTIONS = (
    ("causal", "causal|halve|half"),
    ("full-attention", r"(72|96) ?\*?bl|full.?attention|non-?causal"),
    ("6nd", r"6 ?\*? ?n ?\*? ?d\b"),
    ("palm", "palm"),
)


@dataclass(frozen=True)
class Counted:
    """What a TFLOP/s or MFU figure counts: the convention, whether recomputed FLOPs are in it, and over which peak."""

    convention: str | None = None
    recomputed: bool = False
    peak: float | None = None


def counted(text: str) -> Counted:
    """What the row's own flops_convention says; a formula for hardware FLOPs beside one for model FLOPs is not it."""
    words = ";".join(part for part in text.lower().split(";") if not part.strip().startswith("hfu"))
    # 96·B·L·s·h² is Narayanan et al. 2021 (arXiv 2104.04473) eq. 3: four passes, one of them recomputed.
    recomputed = bool(re.search(r"96 ?\*?bl|hardware|hfu|(with|incl\w*|plus|\+) (the )?recomput", words))
    peak = re.search(r"(\d+(?:\.\d+)?) ?tf|/ ?(\d+(?:\.\d+)?e1[2-6])", words)
    value = None if peak is None else float(peak[1]) * 1e12 if peak[1] else float(peak[2])
    return Counted(_first(_CONVENTIONS, words), recomputed, value)


# The first match decides, so specific names come before general ones.
_MACHINES = (
    ("gb300", "gb300-nvl72"),
    ("gb200", "gb200-nvl72"),
    ("b300", "dgx-b300"),
    ("p6-b200", "p6-b200"),
    ("b200", "dgx-b200"),
    ("h200", "dgx-h200"),
    ("h800", "hgx-h800"),
    (r"h100.*?(500 ?w|hbm2e|96 ?gb)", "grand-teton-h100"),
    (r"h100.*?64 ?gb", "marenostrum5-acc"),
    (r"h100.*?pcie", "h100-pcie-server"),
    ("p5", "p5-h100"),
    ("h100", "dgx-h100"),
    ("a800", "hgx-a800"),
    (r"a100.*?40 ?gb", "dgx-a100-40gb"),
    ("a100", "dgx-a100"),
    ("v100", "dgx-v100"),
    ("mi300x", "mi300x-node"),
    ("mi325x", "mi325x-node"),
    ("mi350x", "mi350x-node"),
    ("mi355x", "mi355x-node"),
    (r"tpu.?v4", "tpu-v4"),
    (r"tpu.?v5e", "tpu-v5e"),
    (r"tpu.?v5p", "tpu-v5p"),
    (r"tpu.?v6e|trillium", "tpu-v6e"),
    (r"tpu.?7x|ironwood", "tpu7x"),
    (r"gaudi.?2", "gaudi2-node"),
    ("ascend.?910b", "ascend-910b-node"),
    (r"gaudi.?3", "gaudi3-node"),
    ("l40s", "ethernet-cluster"),
)
KNOWN = (
    "A100-SXM-80GB, A100-SXM-40GB, A800, H100-SXM-80GB, H100-PCIe, H100-96GB-HBM2e-500W, H100-SXM-64GB, H200, H800, "
    "B200-SXM, B300, GB200-NVL72, GB300-NVL72, V100, MI300X, MI325X, MI350X, MI355X, Ascend-910B, Gaudi2, Gaudi3, "
    "TPU-v4, TPU-v5e, TPU-v5p, TPU-v6e, TPU7x, L40S"
)


def machine_name(text: str, column: str) -> str:
    """The name in the catalogue of the cluster that ``text`` speaks of."""
    for pattern, name in _MACHINES:
        if re.search(rf"(?<![a-z]){pattern}", text, re.IGNORECASE):
            return name
    raise SpecError(column, f"{shown(text)} is unknown", f"known are {KNOWN}")


@dataclass(frozen=True)
class Ports:
    """The network between nodes: what each device is linked by, or what ``count`` ports share in a node."""

    link: Link
    count: int | None

    def on(self, levels: tuple[NetworkLevel, ...]) -> tuple[NetworkLevel, ...]:
        """Levels whose outermost has these ports."""
        outer = replace(levels[-1], link=self.link, ports=self.count, bandwidth=None, latency=None, efficiency=None)
        return (*levels[:-1], outer)


def network(text: str) -> Ports | str | None:
    """What a cell says of the machine's network: a cluster of the catalogue, or a link such as "4 x roce-100"."""
    match = re.fullmatch(r"(?:(\d{1,3}) ?x )?([\w.-]+)", text)
    if not match:
        if text:
            raise SpecError("network", f"{shown(text)} is not a network", "name a cluster or a link: 4 x roce-100")
        return None
    count, name = match.groups()
    if count is None and name in presets.names("cluster"):
        return name
    try:
        return Ports(presets.load("link", Link, name), None if count is None else int(count))
    except SpecError as error:
        raise error.under("network") from None


def slices(text: str) -> int | None:
    """How many tori a row's locator names, such as 2 of "2x v5p-1024"."""
    match = re.search(r"(\d+)x v\d\w*-\d+", text)
    return int(match[1]) if match else None


def shard_group(text: str) -> int | None:
    """Over how many ranks FSDP shards, where a cell names a group: of "group 64 x expert 4" over 256."""
    match = re.search(r"group (\d+)(?: x expert (\d+))?", text)
    return int(match[1]) * int(match[2] or 1) if match else None


def machine(name: str, devices: int, node_devices: int | None = None, tori: int | None = None) -> Cluster:
    """``devices`` of a cluster of the catalogue, ``node_devices`` of them in use on each node or in ``tori`` slices."""
    cluster = cluster_from(name)
    if cluster.levels[0].topology == "torus":
        return _cut_torus(cluster, devices, tori)
    return cut(cluster, devices, node_devices)


def _cut_torus(cluster: Cluster, devices: int, tori: int | None) -> Cluster:
    """Slices of equal shape, as compact as whole cubes of 4 allow; a plane has at most 16 x 16 chips."""
    axes = len(cluster.levels[0].shape)
    tori = tori or (-(-devices // 256) if axes == 2 else 1)
    shape = _compact(devices // tori, axes)
    if devices % tori or shape is None:
        raise SpecError("gpus", f"{devices} chips make no {tori} slices of {cluster.name}", "use a multiple of 64")
    return cluster.with_shape(shape).with_nodes(tori) if tori > 1 else cluster.with_shape(shape)


def _compact(chips: int, axes: int) -> tuple[int, ...] | None:
    """The shape whose longest axis is shortest, of axes that are multiples of 4; the 8 chips of a host are 2x4."""
    if axes == 1:
        return (chips,) if chips and chips % 4 == 0 else None
    if (chips, axes) == (8, 2):
        return (2, 4)
    shapes = [
        (first, *rest)
        for first in range(4, chips + 1, 4)
        if chips % first == 0 and (rest := _compact(chips // first, axes - 1)) is not None and first <= rest[0]
    ]
    return min(shapes, key=max, default=None)


def cut(cluster: Cluster, devices: int, node_devices: int | None = None) -> Cluster:
    """``devices`` of a cluster, ``node_devices`` of them in use on each node."""
    width = cluster.levels[0].width
    # A rack of 72 is one NVLink domain, whatever number of its trays of 4 a table calls a node. Jobs that are no
    # multiple of 72 take the same share of every rack (NVIDIA's recipes: 64 of 72).
    if width > 8 and devices > width:
        node_devices = max(size for size in range(1, width + 1) if devices % size == 0)
    elif width > 8:
        node_devices = None
    if node_devices is not None and node_devices < width:
        cluster = cluster.with_node_devices(node_devices)
    return cluster.with_devices(devices)

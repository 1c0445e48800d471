"""FlashAttention-4 (arXiv 2603.05451; on Hopper the design of FlashAttention-3, arXiv 2407.08608), where installed.

Each pass is one operator, which autograd, the compiler, recompute and CUDA graphs treat like PyTorch's own attention.
(`torch.nn.attention` can use the package as a backend, but not in the present versions of both.) Tensors are [batch,
seq, heads, features] with the log-sum-exp [batch, heads, seq] in fp32; for packed rows, whose ``bounds`` are given,
[tokens, heads, features] and [heads, tokens].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.models.sinks import gradient_of_sinks, with_sinks

PACKAGE, OLDEST = "flash-attn-4", "4.0.0b36"  # as in pyproject.toml
GENERATIONS = (9, 10)  # Hopper and Blackwell
HEADS = ((64, 64), (128, 128))  # features of keys and of values: those for which it was seen to be faster
_KERNELS = "flash_attn.cute.interface"
Gradients = tuple[Tensor, Tensor, Tensor]


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether it computes attention of these tensors.

    Only if gradients are needed: importing and compiling it takes longer than a prompt or a test.
    """
    differentiated = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return differentiated and fits(query, value)


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether there is a kernel for these tensors, on their device."""
    return not misfit(query.dtype, query.shape[-1], value.shape[-1]) and not obstacle(query.device)


def misfit(dtype: torch.dtype, features: int, value_features: int) -> str:
    """Why it is not for numbers and heads like these; nothing if it is."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "it needs bf16 or fp16"
    if (features, value_features) not in HEADS:
        return f"it is not for heads of {features} features for keys and {value_features} for values"
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def obstacle(device: torch.device) -> str:
    """Why it does not run on a device; nothing if it does. The first call on a GPU imports the package."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return "it needs a GPU of NVIDIA"
    if torch.cuda.get_device_capability(device)[0] not in GENERATIONS:
        return "it needs a GPU of the Hopper or Blackwell generation"
    return _missing()


def version() -> str | None:
    """The version of the installed package, found without importing it."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _missing() -> str:
    installed = version()
    if installed is None:
        return "it is not installed: pip install 'shardwise[fa4]'"
    if _numbers(installed) < _numbers(OLDEST):
        return f"{PACKAGE} {installed} is older than {OLDEST}: pip install 'shardwise[fa4]'"
    try:
        importlib.import_module(_KERNELS)
    except Exception as error:  # whatever its compiler finds wrong with this machine
        return f"{PACKAGE} {installed} cannot be imported: {' '.join(str(error).split()) or type(error).__name__}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """4.0.0b36 as (4, 0, 0, 1, 36); a release comes after its previews."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?", version)
    if match is None:
        return ()
    *release, kind, preview = match.groups()
    stage = (3, 0) if kind is None else (("a", "b", "rc").index(kind), int(preview))
    return (*map(int, release), *stage)


def attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor | None, sinks: Tensor | None = None, *,
    causal: bool, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of tensors [batch, seq, heads, features], within ``bounds``; ``window`` counts the query's own key."""
    batch, seq = query.shape[:2]
    if bounds is None:
        whole: Tensor = forward(query, key, value, sinks, None, seq, causal, window, scale)[0]
        return whole
    rows, keys, values = (tensor.flatten(0, 1) for tensor in (query, key, value))
    packed: Tensor = forward(rows, keys, values, sinks, bounds, seq, causal, window, scale)[0]
    return torch.unflatten(packed, 0, (batch, seq))


# -- the operators; ``longest`` is the most tokens that any part of packed rows has ----------------------------------

_SEEN = "Tensor? bounds, SymInt longest, bool causal, int? window, float scale"


def _settings(bounds: Tensor | None, longest: int, causal: bool, window: int | None, scale: float) -> dict[str, Any]:
    reach = None if window is None else window - 1
    seen = {"causal": causal, "window_size_left": reach, "window_size_right": None if causal else reach}
    if bounds is None:
        return {"softmax_scale": scale, **seen}
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"softmax_scale": scale, **seen, **lengths}


@torch.library.custom_op(
    "shardwise::flash_attention_4",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? sinks, {_SEEN}) -> (Tensor, Tensor)",
)
def forward(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *seen: Any) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp."""
    kernels: Any = importlib.import_module(_KERNELS)
    out, log_sum, *_ = kernels._flash_attn_fwd(query, key, value, return_lse=True, **_settings(*seen))
    return with_sinks(out, log_sum, sinks)


@torch.library.custom_op(
    "shardwise::flash_attention_4_backward",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sum, "
    f"{_SEEN}) -> (Tensor, Tensor, Tensor)",
)
def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, *seen: Any
) -> Gradients:
    """The gradients of queries, keys and values; sums in a fixed order where PyTorch is told to be deterministic."""
    kernels: Any = importlib.import_module(_KERNELS)
    of_query, of_key, of_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    kernels._flash_attn_bwd(
        query, key, value, out, gradient.contiguous(), log_sum, dq=of_query, dk=of_key, dv=of_value,
        deterministic=torch.are_deterministic_algorithms_enabled(), **_settings(*seen),
    )  # fmt: skip
    return of_query, of_key, of_value


@forward.register_fake
def _forward_shapes(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *rows, heads, _ = query.shape
    of_log_sum = (heads, *rows) if query.dim() == 3 else (rows[0], heads, rows[1])
    out = query.new_empty((*rows, heads, value.shape[-1]))
    return out, query.new_empty(of_log_sum, dtype=torch.float32)


def differentiate(forward: Any, backward: Any) -> None:
    """Makes the operator ``backward`` the gradient of the operator ``forward``.

    The latter takes queries, keys, values, sinks, a tensor or None, and four settings, and returns output and
    log-sum-exp.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, sinks, further, *ctx.settings = inputs
        ctx.save_for_backward(query, key, value, *output, sinks, further)
        ctx.mark_non_differentiable(output[1])

    def gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks, further = ctx.saved_tensors
        of_sinks = gradient_of_sinks(gradient, tensors[3], tensors[4], sinks)
        return *backward(gradient, *tensors, further, *ctx.settings), of_sinks, None, None, None, None, None

    def shapes(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Gradients:
        return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)

    backward.register_fake(shapes)
    forward.register_autograd(gradients, setup_context=keep)


differentiate(forward, backward)

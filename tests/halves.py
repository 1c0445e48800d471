"""Products of bf16 on processors without such instructions, where OpenBLAS takes 200 times as long as for fp32.

The same numbers but for the order of the sums: both add up in fp32, and round once; attention does not round what is
between its two products either. A CPU that has the instructions runs PyTorch's own kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@cache
def quick_products() -> tuple[torch.library.Library, ...]:
    """From here on in this process; what is returned keeps them."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ()
    own = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name in _PRODUCTS:
            kernel, into = (torch.library.get_kernel(f"aten::{one}", "CPU") for one in (name, f"{name}.out"))
            own.impl(name, _in_fp32(kernel), "CPU", with_keyset=True)
            own.impl(f"{name}.out", _in_fp32_into(into, kernel), "CPU", with_keyset=True)
        for name in (_ATTENTION, f"{_ATTENTION}_backward"):
            own.impl(
                name, _attention_in_fp32(torch.library.get_kernel(f"aten::{name}", "CPU")), "CPU", with_keyset=True
            )
    return (own,)


def _in_fp32(kernel: Any) -> Callable[..., Any]:
    def product(keys: Any, *operands: Any, **options: Any) -> Any:
        if operands[-1].dtype != torch.bfloat16:
            return kernel.call_boxed(keys, *operands, **options)
        return kernel.call_boxed(keys, *(one.float() for one in operands), **options).bfloat16()

    return product


def _in_fp32_into(into: Any, kernel: Any) -> Callable[..., Any]:
    def product(keys: Any, *operands: Any, out: Any, **options: Any) -> Any:
        if operands[-1].dtype != torch.bfloat16:
            return into.call_boxed(keys, *operands, out=out, **options)
        return out.copy_(kernel.call_boxed(keys, *(one.float() for one in operands), **options))

    return product


def _attention_in_fp32(kernel: Any) -> Callable[..., Any]:
    def attention(keys: Any, *given: Any, **options: Any) -> Any:
        if given[0].dtype != torch.bfloat16:
            return kernel.call_boxed(keys, *given, **options)
        results = kernel.call_boxed(keys, *map(_widened, given), **{key: _widened(options[key]) for key in options})
        if len(results) == 3:  # the backward pass: one gradient for each input
            return tuple(one.bfloat16() for one in results)
        return results[0].bfloat16(), results[1]

    return attention


def _widened(one: Any) -> Any:
    return one.float() if isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 else one

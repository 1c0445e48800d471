"""Attention sinks: a logit of each head in the denominator of its softmax, which takes weight and gives no value.

A fused kernel knows no sinks, but returns the log-sum-exp L of each query's scores. With the sink s the output is that
of the kernel times sigmoid(L - s), and the log-sum-exp is log(exp(L) + exp(s)). From these two the kernel's own
backward pass computes exact gradients of queries, keys and values: all it knows of the denominator is that log-sum-exp,
and the sink's value is zero. (gpt-oss, arXiv 2508.10925, section 2.2; after Xiao et al. 2024, arXiv 2309.17453.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def share_of_keys(log_sum: Tensor, sinks: Tensor) -> Tensor:
    """What each query gives to keys, [..., heads, queries] as ``log_sum`` is; the rest goes to the sink of its head."""
    return torch.sigmoid(log_sum - sinks.to(log_sum.dtype).unsqueeze(-1))


def with_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output [..., queries, heads, features] and log-sum-exp [..., heads, queries] of attention with sinks [heads]."""
    if sinks is None:
        return out, log_sum
    share = share_of_keys(log_sum, sinks).transpose(-1, -2).unsqueeze(-1)
    return (out * share).to(out.dtype), torch.logaddexp(log_sum, sinks.to(log_sum.dtype).unsqueeze(-1))


def gradient_of_sinks(gradient: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor | None) -> Tensor | None:
    """The gradient of the sinks, by output and log-sum-exp of attention with them."""
    if sinks is None:
        return None
    share = torch.exp(sinks.to(log_sum.dtype).unsqueeze(-1) - log_sum)
    towards = (gradient.to(log_sum.dtype) * out.to(log_sum.dtype)).sum(-1).transpose(-1, -2)
    lost = -(share * towards)
    return lost.sum([dimension for dimension in range(lost.dim()) if dimension != lost.dim() - 2]).to(sinks.dtype)

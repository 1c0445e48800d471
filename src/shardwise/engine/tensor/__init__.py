"""Tensor and sequence parallelism (Megatron-LM: Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022,
arXiv 2205.05198): linear layers cut by column and row, the vocabulary cut over the ranks.

Not by DTensor, which cannot repeat key-value heads over a part of a group, does not pad a vocabulary, and costs a
dispatch for every operator.
"""

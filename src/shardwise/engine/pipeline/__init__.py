"""Pipeline parallelism: stages of the model on different ranks, run through PyTorch's pipelining runtime."""

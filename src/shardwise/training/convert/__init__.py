"""Weights of other tools and of our checkpoints, written as one file, a Hugging Face folder or a checkpoint."""

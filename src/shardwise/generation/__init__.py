"""Text from a trained model: cached attention, sampling, batches of prompts on any number of ranks, files of them."""

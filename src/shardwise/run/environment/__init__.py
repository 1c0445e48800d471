"""Which launcher started this process, and as which rank: read from the environment."""

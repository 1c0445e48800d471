"""Which strategy is best: the space of strategies, the search through it, and the reasons."""

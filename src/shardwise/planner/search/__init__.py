"""The search: a space of strategies, priced as tables, and the best of them kept."""

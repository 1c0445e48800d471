"""Clusters of several kinds of nodes: their strategies, their step, their plan."""

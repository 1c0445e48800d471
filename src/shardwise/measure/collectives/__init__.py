"""How long collectives take on this cluster, by every algorithm."""

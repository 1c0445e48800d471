"""Linear layers in FP8: how matrices are scaled, cast and multiplied, and which layers of a network are."""

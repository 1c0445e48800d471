"""Activation recompute: what the forward pass does not keep is computed again when the backward pass needs it."""

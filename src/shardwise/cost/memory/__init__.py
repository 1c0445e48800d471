"""What a device holds: model states, activations, the transient memory of a pass, and what offload moves away."""

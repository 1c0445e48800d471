"""What follows the backward pass: gradient norm, number formats, optimizers."""

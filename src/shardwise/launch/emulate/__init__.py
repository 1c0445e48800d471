"""A cluster on one machine: virtual nodes that reach each other through a link of a given rate, delay and loss."""

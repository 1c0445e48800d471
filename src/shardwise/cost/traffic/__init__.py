"""What the ranks of a job send: every parallel dimension, its network, its price, and what it is overlapped with."""

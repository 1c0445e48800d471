"""Communication of a job: every parallel dimension, its network, its price, and what it overlaps with."""

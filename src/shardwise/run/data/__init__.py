"""Token shards on disk, and the order in which training reads them."""

"""Labs: what a text book says of distributed training, run on this machine and judged. A file for each."""

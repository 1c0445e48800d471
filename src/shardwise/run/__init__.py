"""What a run leaves behind and is found by: its folder, checkpoints, data, records and place. Imports no torch."""

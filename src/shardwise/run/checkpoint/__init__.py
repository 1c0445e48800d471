"""The folder of a run and its checkpoints: which there are, what each holds, whether it is whole."""

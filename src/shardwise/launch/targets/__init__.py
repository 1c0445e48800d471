"""What `--on` names: where a command's ranks can be started beyond this machine."""

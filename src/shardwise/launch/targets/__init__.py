"""Where a command's ranks can be started, past this machine: what `--on` names."""

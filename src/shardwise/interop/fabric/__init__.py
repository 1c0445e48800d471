"""How machines are wired, as other tools say it: nvidia-smi, InfiniBand's sysfs, Slurm, labels of Kubernetes."""

"""Where checkpoints and data are kept beyond this machine's disks: object stores behind one small interface."""

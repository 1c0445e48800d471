"""The image that manifests name and `make image` builds: its name, its user, and where files are in it."""

from __future__ import annotations

from shardwise import __version__

IMAGE = f"shardwise:{__version__}"
USER_ID = 1000  # who runs in it: not root
RUNS, DATA = "/runs", "/data"  # where volumes are mounted
JOB_FOLDER, JOB_FILE = "/etc/shardwise", "job.yaml"
EXECUTABLE = "shardwise"

"""Checkpoints: saved under one layout, loaded under any other; nothing is ever unpickled."""

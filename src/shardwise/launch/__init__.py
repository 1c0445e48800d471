"""How processes are started, watched and ended; nothing here imports torch."""

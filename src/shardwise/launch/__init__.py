"""How processes come to be; nothing here imports torch."""

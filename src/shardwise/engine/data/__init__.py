"""Data parallelism: whole copies, ZeRO and FSDP, and workers that synchronise less often than every step."""

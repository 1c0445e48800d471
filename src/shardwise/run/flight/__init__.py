"""The last collectives of every rank, as the backend recorded them, and which rank is missing from one."""

"""Runs on fewer devices than they were planned for, and on more again: the splits, and who is left of this machine."""

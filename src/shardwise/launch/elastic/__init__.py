"""Runs that go on with fewer devices than planned, and grow again: the splits, and which devices are left."""

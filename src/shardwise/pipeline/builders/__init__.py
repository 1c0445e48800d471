"""Builders of pipeline schedules, one file per family, each beside its closed forms."""

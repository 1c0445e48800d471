"""Runs the engine as one rank of a world of any size, without the other ranks and without values.

`run.dry_run` traces a step; `result.DryRun` holds what was found, next to the planner's figures for the same rank.
"""

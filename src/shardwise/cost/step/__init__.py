"""The seconds of a step: floor, prediction, simulation, its parts and what bounds it."""

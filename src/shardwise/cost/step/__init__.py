"""Step time: floor, prediction, simulation, its parts and what bounds it."""

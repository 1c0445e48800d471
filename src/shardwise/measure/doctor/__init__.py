"""Checks of what a long run needs from this machine, before it starts; modules without torch come first."""

"""Checks of what a long run needs from this machine before it starts; those without torch come first."""

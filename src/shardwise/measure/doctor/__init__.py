"""What a long run needs of this machine, tried before it starts; modules without torch come first."""

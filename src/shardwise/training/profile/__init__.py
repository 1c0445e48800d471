"""What ranks record of a few steps."""

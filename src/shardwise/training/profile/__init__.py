"""What ranks record of a few steps, and how it is read again."""

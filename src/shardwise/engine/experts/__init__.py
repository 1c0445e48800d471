"""Experts spread over ranks: tokens are sent to them and back; a rank holds whole experts or slices of them."""

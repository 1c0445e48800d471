"""Algorithms by family: the rounds of each (``build``) and their price (``work``) side by side."""

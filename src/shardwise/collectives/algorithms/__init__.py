"""One file per algorithm: its rounds (``build``) and their price (``work``) side by side."""

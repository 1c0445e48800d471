"""What a run records about itself while it trains."""

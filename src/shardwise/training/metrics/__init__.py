"""What a run tells about itself while it trains."""

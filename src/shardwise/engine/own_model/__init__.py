"""Networks that others wrote, as `parallelize` sees them: their tables, inputs, attention, experts and ends."""

"""What `parallelize` needs to know of networks that others wrote: their tables, inputs, attention, experts, ends."""

"""Many strategies at once: step time and memory, as one job has them, of whole numpy tables of strategies."""

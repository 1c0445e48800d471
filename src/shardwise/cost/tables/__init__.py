"""Many strategies at once: the step time and memory of `cost.prediction` and `cost.memory` on whole numpy tables."""

"""From what a machine measures of itself to the cluster file that `plan` reads."""

"""One file per idea of a pipeline schedule; each makes a ``PipelineSchedule``."""

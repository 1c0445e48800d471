"""Pipeline schedules by family; each builder makes a ``PipelineSchedule`` and has its closed forms beside it."""

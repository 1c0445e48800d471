"""Other tools' descriptions of a model or a job, read as `shardwise.spec` nouns and written back."""

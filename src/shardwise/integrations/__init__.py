"""Other frameworks' training loops: their run is priced before its first step, and measured beside the prediction."""

from shardwise.spec.installation import require_packages

require_packages("shardwise.integrations", "torch")

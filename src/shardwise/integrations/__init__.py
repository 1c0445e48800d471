"""Other frameworks' training loops: their run is priced before its first step, and measured beside the prediction."""

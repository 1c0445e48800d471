"""What really happens: a layout beside one process, a traced step beside the prediction."""

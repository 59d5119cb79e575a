"""COMPUTE: plans become tensors, tensors become results."""

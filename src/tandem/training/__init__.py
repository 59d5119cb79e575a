"""COMPUTE: losses, recordings and their layerwise backward, optimiser, checkpoints."""

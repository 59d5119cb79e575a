"""Computes: models, their attention, frozen linear layers, adapters and sampling, as tensors."""

"""COMPUTE: models, their attention, frozen linears, adapters and sampling, as tensors."""

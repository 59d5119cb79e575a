"""Adapters by name: files in PEFT's format, versions, pins. Knows no tensors."""

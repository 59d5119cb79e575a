"""Computes: turns plans into tensors, and tensors into results."""

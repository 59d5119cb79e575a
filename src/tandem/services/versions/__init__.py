"""Adapters and their versions: loaded, imported, published, rolled back, kept, deleted."""

"""Batches of requests from a file: validated, answered when there is room, written to files."""

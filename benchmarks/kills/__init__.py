"""A server that is killed at random under load, and what is left of its store."""

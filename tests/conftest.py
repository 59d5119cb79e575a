"""Loaded before any test."""

import devices  # noqa: F401  how Triton runs is settled before anything imports it

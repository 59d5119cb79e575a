"""Paged attention on flattened tokens: the seam (`base`), the hook into transformers (`interface`),
and one file per kernel."""

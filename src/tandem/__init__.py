"""Tandem serves a language model and keeps teaching it on the same accelerator."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tandem")
except PackageNotFoundError:  # imported from a tree that was never installed
    __version__ = "0+unknown"

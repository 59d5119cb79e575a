"""Ordinary requests beside strangers who do their worst: large, slow and hostile input.

The rooms: `strangers` send it, `__main__` asks ordinary questions beside them and measures.
"""

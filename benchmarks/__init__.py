"""Studies of the product: reproductions of papers, comparisons with peers, searches, long runs.

One folder a study, run by `python -m benchmarks STUDY` (docs/benchmarks.md). `reporting`, `live`
and `peers` have what several share. Nothing in the product imports from here.
"""

"""Bad feedback of many kinds, and whether a version that answers is broken by it.

Judged by the answers of published versions, with the measure of `benchmarks.live.degeneration`,
not with the gate's. See docs/benchmarks.md.
"""

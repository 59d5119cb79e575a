"""The search for a policy's constants: what may be turned, on which load, by which rule.

Simulates with `tandem.bench.mace`'s loads and engine. Invariant: no candidate meets the held-out
set but the one that the search chose.
"""

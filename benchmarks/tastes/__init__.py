"""What a real chat model does with 40 examples of a taste, while it serves: see docs/benchmarks.md.

Through HTTP only, default settings. Invariant: what is judged was never taught, and the judge
(`benchmarks.live.degeneration`, a rule for each taste) knows nothing of the product's gate.
"""

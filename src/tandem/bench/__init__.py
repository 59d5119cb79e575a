"""Load from outside, over HTTP: open-loop benchmarks and soak runs of any OpenAI-compatible server.

Knows nothing of the engine; it measures what a client sees. Invariant: no module here imports
torch, and a slow server never slows the arrivals down.
"""

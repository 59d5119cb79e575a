"""One CUDA device: ceilings, decode, prefill, adapters, a peer, and training beside requests.

Runs in one process on models of random weights that are made on the device. Knows the product's
public faces only. Invariant: every share is of a ceiling that the same run measured.
"""

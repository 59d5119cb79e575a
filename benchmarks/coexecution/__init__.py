"""Serving and training on one machine: our engine beside the ways to co-locate two peers.

Shares models, workers and ceilings with `peers`. Invariant: each system gets the same closed loop
of requests and the same training steps, and every worker that does not take part is stopped.
"""

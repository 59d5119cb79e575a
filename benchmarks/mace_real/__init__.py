"""MACE's figures 2 and 9 with a real model and the product's own learner and gate.

A server process for each run, HTTP only; pairs are scored afterwards, under the version that
answered when they came. See docs/benchmarks.md.
"""

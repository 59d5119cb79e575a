"""Decides what runs in each iteration. Uses no torch, has no clock of its own, sees no text.

A policy in `policies/` proposes, `admission` grants within the budgets, `scheduler` keeps the
state.
"""

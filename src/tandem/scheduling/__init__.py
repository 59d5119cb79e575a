"""Decides every iteration what runs. No torch, no clock of its own, no text.

`policies/` wish, `admission` grants within the budgets, `scheduler` keeps the state.
"""

"""Scheduling policies, one file or package each; its `create()` makes the policy of that name."""

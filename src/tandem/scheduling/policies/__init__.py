"""Scheduling policies, one file each; a file's `create()` makes the policy of that name."""

"""The planner's answer for this machine, and a sweep of the engine beside it."""

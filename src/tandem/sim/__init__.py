"""The engine without a device: the same loop and scheduler under a virtual clock.

`executor` answers plans from a profile. `run` makes requests arrive and time pass. `curves` models
how the loss falls. Nothing here waits.
"""

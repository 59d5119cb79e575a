"""The engine without a device: the same loop and scheduler under a virtual clock.

`executor` answers plans from a profile, `run` lets arrivals come and time pass, `curves` says how
the loss falls. Nothing here waits.
"""

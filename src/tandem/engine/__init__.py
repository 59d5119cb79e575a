"""Runs the scheduler against an executor, in this process or in a separate one.

`loop` is the iteration. `host` serves it over a channel. `client` is the async handle. `process`
starts, watches and restarts a host.
"""

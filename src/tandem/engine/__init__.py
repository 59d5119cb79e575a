"""Runs the scheduler against an executor, in this process or in one of its own.

`loop` is the heart; `host` serves it over a channel; `client` is the async handle; `process`
starts, watches and restarts a host.
"""

"""What the studies of live learning share: a server process, its HTTP API, a measure of answers.

Only public interfaces of the product are used here. Invariant: nothing here reads what the gate
measured, so that a study judges answers independently of it.
"""

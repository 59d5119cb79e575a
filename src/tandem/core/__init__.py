"""The vocabulary: every noun of the system as plain data, standard library only.

Read this package first. Nothing here does work; the other packages pass these objects around.
Invariant: no module in `core` imports anything outside the standard library and `core`.
"""

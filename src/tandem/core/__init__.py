"""The vocabulary: every noun of the system as plain data, standard library and msgspec only.

Read this package first. Nothing here does work; the other packages pass these objects around.
Invariant: no module in `core` imports anything else but `core`.
"""

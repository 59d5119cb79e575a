"""The vocabulary: every noun of the system as plain data, standard library and msgspec only.

Read this package first. It does no work; the other packages pass these objects around. Invariant: a
module in `core` imports no other package of Tandem.
"""

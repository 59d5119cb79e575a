"""SLO attainment and training throughput of the scheduling policies under recorded arrivals.

Shares models, workers and machine names with `peers`, training steps with `coexecution`. Invariant:
in one round every policy gets the same requests at the same times, and an engine that does not take
part is stopped.
"""

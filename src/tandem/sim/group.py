"""A load over several engines of one machine, in the simulator.

Engines share nothing and never wait for each other, and what places a request knows requests alone.
So each engine may be run to its end on a clock of its own: all clocks begin together, and the times
are the same as on one. Unlike in a server, an engine gets requests also while others wait for it.
Knows no profile and no policy. Invariant: every request is in the load of
exactly one engine, training steps in the main one's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.core.request import Request
from tandem.engine.placement import MAIN, Placement
from tandem.sim.run import Arrival, SimReport


def divided(
    arrivals: Sequence[Arrival],
    placement: Placement,
    engines: int,
    known: Callable[[Request], Request] = lambda request: request,
) -> list[list[Arrival]]:
    """The load of each engine. `known` gives a request as the placement sees it."""
    loads: list[list[Arrival]] = [[] for _ in range(engines)]
    able = range(engines)
    for arrival in sorted(arrivals, key=lambda arrival: arrival.at_s):
        work = arrival.work
        place = placement.place(known(work), able) if isinstance(work, Request) else MAIN
        loads[place].append(arrival)
    return loads


def together(main: SimReport, other: SimReport) -> SimReport:
    """One report of two engines, with the requests in order of arrival; occupancy is `main`'s."""
    outcomes = [*main.outcomes.values(), *other.outcomes.values()]
    outcomes.sort(key=lambda outcome: outcome.arrival_s)
    return SimReport(
        began_s=main.began_s,
        outcomes={outcome.request_id: outcome for outcome in outcomes},
        steps=[*main.steps, *other.steps],
        occupancy=main.occupancy,
        ended_s=max(main.ended_s, other.ended_s),
        iterations=main.iterations + other.iterations,
    )

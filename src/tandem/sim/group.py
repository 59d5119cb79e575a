"""A load over several engines of one machine, in the simulator.

Engines share nothing and never wait for each other. Each runs on a clock of its own, and all clocks
begin together, so the times are those of one clock. Which engines can take a request is seen when
it comes, so those beside the main one run until then. Knows no profile and no policy. Invariant:
every request goes to one engine, training steps to the main one; as in a server
(`engine/group.py`), another engine gets none while one waits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.core.request import Request
from tandem.engine.placement import MAIN, Placement
from tandem.sim.run import Arrival, SimReport, Simulation


def divide(
    arrivals: Sequence[Arrival],
    placement: Placement,
    engines: Sequence[Simulation],
    known: Callable[[Request], Request] = lambda request: request,
) -> None:
    """Give each arrival to one of `engines`, of which the first is the main one; then they are to
    be run to their ends. `known` gives a request as the placement sees it."""
    for arrival in sorted(arrivals, key=lambda arrival: arrival.at_s):
        place, work = MAIN, arrival.work
        if isinstance(work, Request):
            needed = len(work.prompt) + work.sampling.max_tokens
            needed = min(needed, engines[MAIN].max_model_len)
            able = [
                each
                for each, engine in enumerate(engines)
                if each != MAIN
                and needed <= engine.max_model_len
                and engine.can_take(work, arrival.at_s)
            ]
            place = placement.place(known(work), [MAIN, *able])
        engines[place].arrive(arrival)


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

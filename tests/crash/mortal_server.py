"""`tandem` with points in it where it, or its engine, may die.

Arguments: the file of the orders, then those of `tandem`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from mortality import ENGINE_MODULE, Mortality

from tandem import build
from tandem.cli import main
from tandem.services.feedback import service as feedback
from tandem.services.jobs import tools
from tandem.services.learning import publish


def make_mortal(mortality: Mortality, orders: str) -> None:
    """Put the points into what `build` joins."""
    engine = [sys.executable, str(Path(__file__).with_name(ENGINE_MODULE)), orders]
    transport = build.ProcessTransport
    build.ProcessTransport = lambda _command, *rest, **named: transport(engine, *rest, **named)
    publish.Publisher = partial(publish.Publisher, at=mortality.at)
    tools.JobTools = partial(tools.JobTools, at=mortality.at)
    take = feedback.FeedbackService.take

    async def mortal_take(self, said, caller):
        stored = await take(self, said, caller)
        mortality.at("committed")
        return stored

    feedback.FeedbackService.take = mortal_take


if __name__ == "__main__":
    make_mortal(Mortality(Path(sys.argv[1])), sys.argv[1])
    del sys.argv[1]
    main()

"""Routes about what goes on: what a key may do here, and the last iterations of the engine.

What is counted over time is in /metrics. Invariant: nothing here tells one key of another's texts,
names or requests.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request, Response

from tandem.api.connection import as_json
from tandem.api.paging import read_limit, read_number
from tandem.api.surface import Surface
from tandem.core.events import IterationRecord
from tandem.services.answering.models import BASE_LABEL
from tandem.services.auth import Caller

_MOST = 2000


def add_stats_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/key and /v1/stats."""

    @app.get("/v1/key")
    async def describe_key(request: Request) -> Response:
        """What this key may do, and what this server does for it."""
        caller: Caller = request.state.caller
        slo = surface.objectives.of(BASE_LABEL, caller.ttft_slo, caller.tpot_slo)
        body = {
            "object": "key",
            "required": surface.keys.required,
            "name": caller.name or None,
            "serve": list(caller.serve),
            "train": list(caller.train) if surface.outlooks else [],
            "admin": caller.admin,
            "ttft_slo": slo.ttft_s,
            "tpot_slo": slo.tpot_s,
            "model": surface.models.served_name,
            "max_model_len": surface.client.info.max_model_len,
            "learning": surface.versions is not None,
            "auto_adapters": surface.models.auto_adapters,
        }
        return as_json(body)

    @app.get("/v1/stats/iterations")
    async def list_iterations(request: Request) -> Response:
        """The engine's last iterations, oldest first; `after` leaves out those that are known."""
        limit = read_limit(request, 200, _MOST)
        stats = await surface.client.stats(limit, read_number(request, "after") or 0)
        epoch_s = time.time() - time.monotonic()  # when the clock was 0 that the engine shares
        data = [_iteration_json(record, epoch_s) for record in stats.recent]
        body = {"object": "list", "data": data, "iterations": stats.iterations}
        return as_json(body)


def _iteration_json(record: IterationRecord, epoch_s: float) -> dict[str, Any]:
    """`epoch_s` is when the engine's clock was 0."""
    return {
        "object": "iteration",
        "number": record.number,
        "started_at": epoch_s + record.start_s,
        "seconds": record.elapsed_s,
        "forward_s": record.forward_s,
        "backward_s": record.backward_s,
        "rows": {
            "decode": record.decode,
            "prefill": record.prefill,
            "offline": record.offline,
            "forward": record.forward,
        },
        "layers": record.layers,
        "updates": record.updates,
    }

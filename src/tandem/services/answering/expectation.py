"""What is known of how long answers will be, before their requests go to the engine.

Knows no engine. Invariant: a prompt has one prediction, or nobody predicts and there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.lengths import Asked
from tandem.core.request import Request
from tandem.estimators.length_choice import Predicted
from tandem.services.answering.models import ServedModel
from tandem.services.answering.receipts import Draft
from tandem.services.lengths.forecasts import Lengths


def predictions(
    lengths: Lengths | None,
    draft: Draft,
    model: ServedModel,
    requests: Sequence[Request],
    batch: str,
) -> list[Predicted]:
    """One for each prompt; `batch` is the job whose line it is. Empty if nobody predicts."""
    if lengths is None:
        return []
    texts = draft.prompts or (draft.receipt.messages[-1].get("content") or "",)
    return [
        lengths.predict(
            Asked(
                adapter=model.checkpoint or model.name or "",
                endpoint="completions" if draft.prompts else "chat/completions",
                max_tokens=request.sampling.max_tokens,
                input_tokens=len(request.prompt),
                scores=lengths.scores(text),
                batch=batch,
            )
        )
        for request, text in zip(requests, texts, strict=True)
    ]

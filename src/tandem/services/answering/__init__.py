"""From text to an answer: names of models, prompts, queue limits, streams, receipts."""

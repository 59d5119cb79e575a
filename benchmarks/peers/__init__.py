"""Speed beside other engines: random-weight models, one worker process an engine, interleaved jobs.

Knows nothing of `tandem` but its public `LLM`. Invariant: while one worker is measured every
other one is stopped by signal, so that all of them get the same machine.
"""

"""Structured output: 300 schemas alone, together, preempted; hostile grammars; costs of a mask."""

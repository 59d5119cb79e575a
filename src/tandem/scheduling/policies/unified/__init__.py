"""The default policy: online requests first, offline requests and learning in what is left.

`policy` decides. The other modules give it the load, deadlines, order and prompts of requests, and
the time, capacity and balance of learning. See docs/unified.md.
"""

from tandem.scheduling.policies.unified.policy import Options, Unified, create

__all__ = ["Options", "Unified", "create"]

"""The default policy: online requests first, offline requests and learning in what is left.

`policy` decides; the other modules are what it decides with: load, deadlines, turns and prompts of
requests, time, room and balance of learning. See docs/unified.md.
"""

from tandem.scheduling.policies.unified.policy import Options, Unified, create

__all__ = ["Options", "Unified", "create"]

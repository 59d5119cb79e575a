"""The default policy: online requests first, offline requests and learning in what is left.

`policy` decides in five steps, of which `observe` is the first. The other modules know the online
requests (`deadlines`, `online`), the rest (`rest`), and the account (`ledger`, `deficit`). See
docs/unified.md.
"""

from tandem.scheduling.policies.unified.policy import Options, Unified, create

__all__ = ["Options", "Unified", "create"]

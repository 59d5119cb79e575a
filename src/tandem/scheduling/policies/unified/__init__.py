"""The default policy: online requests first, offline requests and learning in what is left.

`policy` decides in five steps. The other modules know the online requests (`deadlines`, `load`,
`online`), the rest (`offline`, `learning`), and the account (`ledger`, `deficit`). See
docs/unified.md.
"""

from tandem.scheduling.policies.unified.policy import Options, Unified, create

__all__ = ["Options", "Unified", "create"]

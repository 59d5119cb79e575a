"""What is compared: Echo, the systems that lack parts of it, and any other policy.

Invariant: a name stands for one policy with fixed options.
"""

from __future__ import annotations

from dataclasses import dataclass, field

BASELINE, ECHO, OURS = "BS", "Echo", "unified"


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with options, as of `tandem serve`."""

    policy: str
    options: dict[str, str] = field(default_factory=dict)


def _ablation(**parts: bool) -> Variant:
    return Variant("echo", {name: str(on).lower() for name, on in parts.items()})


VARIANTS = {
    BASELINE: _ablation(estimator=False, scheduler=False, cache=False),
    "BS+E": _ablation(estimator=True, scheduler=False, cache=False),
    "BS+E+S": _ablation(estimator=True, scheduler=True, cache=False),
    ECHO: _ablation(estimator=True, scheduler=True, cache=True),
    OURS: Variant("unified"),
}


def chosen(names: list[str] | None) -> dict[str, Variant]:
    """Those of `VARIANTS`, or other policies as NAME or NAME:OPTION=VALUE,...; the first is what
    the others are compared with. Without names all of `VARIANTS`."""
    found = {}
    for name in names or VARIANTS:
        policy, _, rest = name.partition(":")
        options = dict(each.split("=", 1) for each in rest.split(",") if each)
        found[name] = VARIANTS.get(name) or Variant(policy, options)
    return found

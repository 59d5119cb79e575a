"""Policies by name: those of `scheduling/policies`, one file each, and others' by module and class.

Knows names and options; what a policy does is its own. Invariant: a wrong name or option raises
`InvalidRequest` that lists the right ones.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.scheduling.view import Policy


def build_policy(name: str, options: Mapping[str, str] | None = None) -> Policy:
    """The policy `name` of `scheduling/policies`, or `package.module:Class` from elsewhere (or a
    function that makes one).

    A factory that takes `options` names a dataclass as their type; texts are converted to it.
    Raises `InvalidRequest` that lists the known policies, or the policy's options.
    """
    module, colon, factory_name = name.partition(":")
    if not factory_name:
        module, factory_name = f"tandem.scheduling.policies.{name.replace('-', '_')}", "create"
    try:
        factory = getattr(importlib.import_module(module), factory_name)
    except (ImportError, AttributeError) as error:
        why = f" ({error})" if colon else ""
        raise InvalidRequest(
            f"there is no policy {name!r}{why}; known: {', '.join(known_policies())}, or "
            "package.module:Class"
        ) from error
    taken = inspect.signature(factory, eval_str=True).parameters.get("options")
    kinds = [] if taken is None else [taken.annotation]
    known = [field.name for kind in kinds for field in fields(kind)]
    if unknown := [option for option in options or {} if option not in known]:
        raise InvalidRequest(
            f"policy {name!r} has no option {unknown[0]!r}; it has: {', '.join(known) or 'none'}"
        )
    policy = factory(*[_policy_options(name, kind, options or {}) for kind in kinds])
    if not isinstance(policy, Policy):
        raise InvalidRequest(
            f"{name!r} is no policy: it lacks `decide`, `decodes_alike` or `records_in_parts`"
        )
    return policy


def _policy_options(policy: str, kind: type, options: Mapping[str, str]) -> object:
    """The dataclass `kind` with these options; raises `InvalidRequest` that says which is wrong."""
    types, found = get_type_hints(kind), {}
    for name, text in options.items():
        try:
            found[name] = msgspec.convert(text, types[name], strict=False)
        except msgspec.ValidationError as error:
            wanted = getattr(types[name], "__name__", types[name])
            raise InvalidRequest(
                f"option {name} of policy {policy!r} has to be of type {wanted}, not {text!r}"
            ) from error
    try:
        return kind(**found)
    except ValueError as error:
        given = ", ".join(f"{name}={text}" for name, text in options.items())
        raise InvalidRequest(f"policy {policy!r} with {given}: {error}") from error


def known_policies() -> list[str]:
    """Names of the policies that are shipped: one file each."""
    folder = Path(__file__).parent / "policies"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")

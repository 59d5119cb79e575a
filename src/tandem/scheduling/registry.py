"""Policies by name: a file or package of `scheduling/policies`, or a class of another module.

Knows names and options, not what a policy does. Invariant: a wrong name or option raises
`InvalidRequest` that lists the valid ones.
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
from tandem.estimators.batching import MEASURED
from tandem.scheduling.view import Policy


def build_policy(
    name: str,
    options: Mapping[str, str] | None = None,
    measured: Mapping[str, str] | None = None,
) -> Policy:
    """The policy `name` of `scheduling/policies`, or `package.module:Class` from elsewhere. A
    function that makes a policy may stand for the class. `measured` are values of a profile, for
    options of these names that take them (`estimators.batching.MEASURED`) and that `options` leaves
    out.

    A factory with options has a parameter `options`, annotated with a dataclass. The option texts
    are converted to the types of its fields. Raises `InvalidRequest` that lists the known policies,
    or the policy's options.
    """
    module, colon, factory_name = name.partition(":")
    if not colon:
        module, factory_name = f"{__package__}.policies.{name.replace('-', '_')}", "create"
    try:
        factory = getattr(importlib.import_module(module), factory_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        unknown = isinstance(error, ModuleNotFoundError) and error.name == module
        why = "" if unknown else f" ({error})"
        raise InvalidRequest(
            f"there is no policy {name!r}{why}; known: {', '.join(known_policies())}, or "
            "package.module:Class"
        ) from error
    if not callable(factory):
        raise InvalidRequest(f"{name!r} is no policy: it cannot be called")
    taken = inspect.signature(factory, eval_str=True).parameters.get("options")
    kinds = [] if taken is None else [taken.annotation]
    declared = [field for kind in kinds for field in fields(kind)]
    known = [field.name for field in declared]
    if wrong := [option for option in options or {} if option not in known]:
        raise InvalidRequest(
            f"policy {name!r} has no option {wrong[0]!r}; it has: {', '.join(known) or 'none'}"
        )
    taking = [field.name for field in declared if field.metadata == MEASURED]
    found = {each: text for each, text in (measured or {}).items() if each in taking}
    given = found | dict(options or {})
    policy = factory(*[_policy_options(name, kind, given) for kind in kinds])
    if not isinstance(policy, Policy):
        raise InvalidRequest(f"{name!r} is no policy: it lacks `decide` or `traits`")
    return policy


def _policy_options(policy: str, kind: type, options: Mapping[str, str]) -> object:
    """The dataclass `kind` with these options. Raises `InvalidRequest` that names the wrong one."""
    types = get_type_hints(kind, include_extras=True)
    for name, text in options.items():
        try:
            msgspec.convert(text, types[name], strict=False)
        except msgspec.ValidationError as error:
            wanted = inspect.formatannotation(types[name])
            raise InvalidRequest(
                f"option {name} of policy {policy!r} has to be of type {wanted}, not {text!r}"
                f" ({error})"
            ) from error
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:  # an option is missing, or two contradict
        given = ", ".join(f"{name}={text}" for name, text in options.items()) or "no option"
        raise InvalidRequest(f"policy {policy!r} with {given}: {error}") from error


def known_policies() -> list[str]:
    """Names of the bundled policies: one file or one package each."""
    folder = Path(__file__).parent / "policies"
    packages = (path.parent for path in folder.glob("*/__init__.py"))
    return sorted(
        path.stem for path in (*folder.glob("*.py"), *packages) if path.stem != "__init__"
    )

"""Reads an untrusted `adapter_config.json` and checks its content.

Sizes are bounded before anything is parsed, types are checked before use, and regular expressions
before they are matched. Does not know which settings the model can compute. Invariant: the engine
can read a returned configuration in bounded time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.adapters.patterns import Ways, count_ways
from tandem.core.errors import AdapterError

MOST_CONFIG_BYTES = 1 << 20
_MOST_NAMES = 4096
_MOST_PATTERNS = 500  # of each kind; Python caches this many compiled patterns
_MOST_WAYS = 150_000  # of all patterns together, for one layer's name
_MOST_NUMBER = 1e9
_PLAIN = re.compile(r"[\w.]{1,256}")
# The reader of the weights puts this before a pattern: `(.*\.)?`.
_PREFIX = Ways(1, 2)


def read_configuration(file: Path) -> dict[str, Any]:
    """The configuration. Raises `AdapterError` that names the faulty setting."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MOST_CONFIG_BYTES + 1)
        if len(raw) > MOST_CONFIG_BYTES:
            raise AdapterError(f"{file.name} has more than {MOST_CONFIG_BYTES} bytes")
        config = json.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        raise AdapterError(f"cannot read {file.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise AdapterError(f"{file.name} is not UTF-8; save it as UTF-8") from error
    except RecursionError as error:
        raise AdapterError(f"{file.name} is nested too deeply") from error
    except ValueError as error:
        raise AdapterError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file.name} does not hold a configuration")
    _check(config)
    return config


def _check(config: Mapping[str, Any]) -> None:
    ways = 0.0
    for name in ("target_modules", "exclude_modules"):
        ways += _check_modules(name, config.get(name))
    for name in ("rank_pattern", "alpha_pattern"):
        ways += _check_patterns(name, config.get(name), whole=name == "rank_pattern")
    if ways > _MOST_WAYS:
        raise AdapterError(
            "the patterns of adapter_config.json could take too long to match; name the layers "
            "in a list instead"
        )
    _check_number("r", config.get("r"), whole=True)
    _check_number("lora_alpha", config.get("lora_alpha"), whole=False)
    layers = config.get("layers_to_transform")
    for layer in layers if isinstance(layers, list) else [layers]:
        if layer is not None and type(layer) is not int:
            raise AdapterError("layers_to_transform must be a number or a list of numbers")
    names = config.get("layers_pattern") or []
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise AdapterError("layers_pattern must be a name or a list of names")


def _check_modules(name: str, value: object) -> float:
    """Check a pattern, whose number of ways is returned, or a list of names."""
    if isinstance(value, str):
        return count_ways(value).number
    if value is None:
        return 0.0
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise AdapterError(f"{name} must be a text or a list of texts")
    if len(value) > _MOST_NAMES:
        raise AdapterError(f"{name} has more than {_MOST_NAMES} names")
    return 0.0


def _check_patterns(name: str, value: object, *, whole: bool) -> float:
    """Check a mapping from patterns of layer names to numbers; returns the number of ways."""
    if value is None:
        return 0.0
    if not isinstance(value, dict):
        raise AdapterError(f"{name} must map patterns to numbers")
    if len(value) > _MOST_PATTERNS:
        raise AdapterError(f"{name} has more than {_MOST_PATTERNS} patterns")
    for pattern, number in value.items():
        _check_number(f"{name} of {pattern[:100]!r}", number, whole=whole)
    return sum((_PREFIX * count_ways(pattern)).number for pattern in value)


def _check_number(name: str, value: object, *, whole: bool) -> None:
    if value is None:
        return
    kind = "a whole number above 0" if whole else "a number"
    right = type(value) is int or (isinstance(value, float) and not whole and math.isfinite(value))
    if not right or not isinstance(value, int | float) or abs(value) > _MOST_NUMBER:
        raise AdapterError(f"{name} must be {kind}, at most {_MOST_NUMBER:.0f}")
    if whole and value < 1:
        raise AdapterError(f"{name} must be {kind}")

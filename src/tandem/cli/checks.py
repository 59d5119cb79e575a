"""What can be found wrong, or worth a warning, before a model is loaded.

Each check looks at files and names alone, in milliseconds; who uses the setting checks it again.
Invariant: what is refused here would have been refused later, after everything was loaded.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.adapters.files import inspect_adapter
from tandem.build import division_of
from tandem.cli.flags import all_settings
from tandem.config import ENV_PREFIX, Settings, StoreConfig, variable_of
from tandem.core.errors import InvalidRequest
from tandem.core.slo import Objectives, Slo
from tandem.estimators.profile import read_profile
from tandem.scheduling.registry import build_policy
from tandem.services.auth import ApiKeys
from tandem.services.learning.settings import defaults
from tandem.store.locks import PRIVATE

# Variables of ours that are no settings, and beginnings of those that are not ours.
_OTHER_VARIABLES = ("TANDEM_API_KEY", "TANDEM_URL", "TANDEM_KERNEL_CACHE", "TANDEM_MODEL_CACHE")
_FOREIGN_VARIABLES = ("TANDEM_TEST_", "TANDEM_SHARED_")
_OF_SERVICES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)|=(tcp|udp)://")


def check(settings: Settings) -> None:
    """Refuse what a server cannot start with. Raises `InvalidRequest` that names the setting."""
    check_device(settings)
    division_of(settings)
    scheduling = settings.scheduling
    build_policy(scheduling.policy, scheduling.policy_options)
    Objectives.parse(Slo(scheduling.ttft_slo, scheduling.tpot_slo), scheduling.adapter_slos)
    if scheduling.profile:
        read_profile(Path(scheduling.profile))
    ApiKeys.read(settings.server.api_keys, settings.server.api_key_file)
    defaults(settings.learning)
    _check_adapters(settings)
    _check_store(settings.store)
    if settings.learning.canary_file:
        from tandem.services.learning.canary import read_canary

        read_canary(settings.learning.canary_file)


def check_device(settings: Settings) -> None:
    """Refuse a device that is not there. Raises `InvalidRequest`."""
    if settings.model.device == "cuda":
        from tandem.model.load import choose_device

        choose_device(settings.model.device)


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like settings and are none, with the most similar one ("": none).

    What others set is not meant: tests' variables, and those that Kubernetes makes of the names of
    services.
    """
    known = {variable_of(setting.path): setting.name.upper() for setting in all_settings()}
    begins = tuple({f"{ENV_PREFIX}{setting.section}_".upper() for setting in all_settings()})
    found: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name in known or name in _OTHER_VARIABLES:
            continue
        if name.startswith(_FOREIGN_VARIABLES) or _OF_SERVICES.search(f"{name}={value}"):
            continue
        same = [other for other, tail in known.items() if name == f"{ENV_PREFIX}{tail}"]
        similar = same or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if similar or name.startswith(begins):
            found[name] = similar[0] if similar else ""
    return found


def warnings(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    """What is allowed and probably not meant."""
    for name, similar in unknown_variables(environ).items():
        hint = f"; did you mean {similar}?" if similar else " (docs/settings.md lists them)"
        yield f"the environment variable {name} is no setting and is ignored{hint}"
    if opened := open_to_all(settings):
        yield opened


def open_to_all(settings: Settings) -> str:
    """What anybody who reaches the server may do; empty if keys are needed, or nobody else can."""
    server = settings.server
    if server.api_keys or server.api_key_file or _only_here(server.host):
        return ""
    teach = ", teach it and erase what it learned" if settings.learning.enabled else ""
    return (
        f"ANYBODY WHO REACHES {server.host} MAY USE THIS SERVER{teach.upper()}: there are no API "
        "keys. Give --api-key or --api-key-file, or listen on --host 127.0.0.1"
    )


def _only_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_adapters(settings: Settings) -> None:
    for name, directory in settings.adapters.preload.items():
        try:
            inspect_adapter(directory)
        except InvalidRequest as error:
            raise InvalidRequest(f"--adapter {name}: {error}", param="adapters.preload") from error
    for root in settings.adapters.roots:
        if not Path(root).is_dir():
            raise InvalidRequest(
                f"--adapter-root: there is no directory {root}", param="adapters.roots"
            )


def _check_store(store: StoreConfig) -> None:
    """The directory exists or can be made, and can be written to."""
    directory = Path(store.directory)
    try:
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        problem = "is no directory"
    except OSError as error:
        problem = f"cannot be used: {error.strerror}"
    else:
        return
    raise InvalidRequest(
        f"--store-directory: {directory} {problem}; choose another", param="store.directory"
    )

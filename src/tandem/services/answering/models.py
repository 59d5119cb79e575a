"""Which names clients may put into `model`, and what each of them selects.

`NAME` is the base model and `NAME:ADAPTER` the base with an adapter; an adapter that has learned
nothing yet answers as the base does. `NAME:ADAPTER:JOB:ckpt-step-N` is a checkpoint of a job, which
is not listed. Invariant: only names that the engine can serve at this moment are listed, only to
callers who may see them, and never those that begin with `INTERNAL`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from tandem.core.errors import InvalidRequest, NotFound
from tandem.core.ports import ServingEngine
from tandem.core.version import INTERNAL, AdapterVersion
from tandem.services.auth import Caller
from tandem.services.versions.adapters import check_name
from tandem.services.versions.checkpoints import Checkpoints

BASE_LABEL = "base"
SEPARATOR = ":"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One name of the list; `adapter` is the version that answers (None: the base model),
    `max_model_len` in tokens. `name` is the adapter's, also while it has no version yet.
    `checkpoint` is the label of a checkpoint of a job that trains `name`; it never learns. `label`
    is the version named in answers (empty: the engine's own label)."""

    id: str
    base: str
    adapter: AdapterVersion | None
    max_model_len: int
    name: str | None = None
    checkpoint: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """What answers instead of an adapter's current version: `version`, which is loaded under a name
    of its own, or the base model (None)."""

    version: AdapterVersion | None


def pinned_to(model: ServedModel, pin: Pin | None) -> ServedModel:
    """`model`, answered by what is pinned (None: as it is)."""
    if pin is None or model.name is None:
        return model
    if pin.version is None:
        return replace(model, adapter=None)
    return replace(model, adapter=pin.version, label=f"{model.name}@{pin.version.number}")


class Models:
    """The base model under its served name, the adapters that are loaded now, and checkpoints.
    With `auto_adapters` the first feedback about an adapter makes it."""

    def __init__(
        self,
        client: ServingEngine,
        served_name: str,
        created_s: int,
        checkpoints: Checkpoints | None = None,
        *,
        auto_adapters: bool = False,
    ) -> None:
        self._client = client
        self.served_name = served_name
        self.created_s = created_s
        self._checkpoints = checkpoints
        self.auto_adapters = auto_adapters
        self._announced: set[str] = set()

    def announce(self, adapter: str) -> None:
        """An adapter exists, though perhaps without a version yet."""
        self._announced.add(adapter)

    def withdraw(self, adapter: str) -> None:
        """Stop listing an adapter, unless the engine still has a version of it."""
        self._announced.discard(adapter)

    def listed(self, caller: Caller) -> list[ServedModel]:
        """Those that `caller` may see: base first, then adapters by name. Raises `EngineDead`
        before the first start."""
        length = self._client.info.max_model_len
        base = ServedModel(self.served_name, self.served_name, None, length)
        loaded = {
            name: version
            for name, version in self._client.adapters.items()
            if not name.startswith(INTERNAL)
        }
        models = [base] + [
            ServedModel(self.id_of(name), self.served_name, loaded.get(name), length, name)
            for name in sorted(self._announced | loaded.keys())
        ]
        return [model for model in models if caller.may_see(model.name)]

    def id_of(self, adapter: str) -> str:
        """What clients send to use `adapter`."""
        return f"{self.served_name}{SEPARATOR}{adapter}"

    async def resolve(self, model_id: str, caller: Caller) -> ServedModel:
        """As `find`, and checkpoints of the jobs of `caller`."""
        label = model_id.removeprefix(self.id_of(""))
        if self._checkpoints is not None and label != model_id:
            version = await self._checkpoints.find(label, caller.tenant)
            if version is not None:
                length, adapter = self._client.info.max_model_len, label.partition(SEPARATOR)[0]
                return ServedModel(model_id, self.served_name, version, length, adapter, label)
        return self.find(model_id, caller)

    def held(self, model: ServedModel) -> AbstractAsyncContextManager[None]:
        """While entered, a checkpoint stays loaded (`Checkpoints.held`); no effect on others."""
        if self._checkpoints is None or model.adapter is None or not model.checkpoint:
            return nullcontext()
        return self._checkpoints.held(model.adapter)

    def or_base(self, model: ServedModel) -> bool:
        """Whether the base answers as `model` if its version is taken back before the engine has
        the request: an adapter that learns may be rolled back to the base at any time."""
        version = model.adapter
        own = version is not None and not version.internal and not model.checkpoint
        return own and model.name in self._announced

    def find(self, model_id: str, caller: Caller) -> ServedModel:
        """The model of that name. Raises `NotFound`, also for models that `caller` may not see; the
        message lists the visible ones."""
        listed = self.listed(caller)
        for model in listed:
            if model.id == model_id:
                return model
        known = ", ".join(model.id for model in listed) or "none for this API key"
        hint = ""
        if self._may_be_made(model_id, caller):
            hint = f" (its first feedback makes it; until then ask for '{self.served_name}')"
        raise NotFound(
            f"the model '{model_id[:200]}' does not exist; this server knows: {known}{hint}",
            param="model",
            code="model_not_found",
        )

    def _may_be_made(self, model_id: str, caller: Caller) -> bool:
        """Whether feedback of `caller` about it would be taken, and make it."""
        adapter = model_id.removeprefix(self.id_of(""))
        if adapter == model_id or not (self.auto_adapters and caller.may_train(adapter)):
            return False
        try:
            check_name(adapter)
        except InvalidRequest:
            return False
        return True

    def fingerprint(self, adapter_label: str) -> str:
        """OpenAI's `system_fingerprint`: names all of the configuration that changes answers."""
        info = self._client.info
        weights = info.weights_hash[:8]
        return f"{self.served_name}-{weights}-{info.dtype}-{info.kernels}-{adapter_label}"

"""Whether a model can be served exactly, as far as its configuration tells.

Refuses by name before any weight is read. `probe` and `self_test` find what the configuration does
not tell.
"""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from tandem.core.errors import InvalidRequest, UnsupportedModel

_EXACT_LAYERS = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def refuse(name: str, config: PreTrainedConfig) -> None:
    """Raise `UnsupportedModel` if this is no plain text decoder, or for settings of its own."""
    # A composite configuration describes several models. Only plain decoders are served.
    if config.sub_configs:
        parts = ", ".join(sorted(config.sub_configs))
        raise UnsupportedModel(f"{name} is made of several models ({parts}); serve a text decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{name} ({config.model_type}) is no causal language model")
    if MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._is_stateful:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) keeps a recurrent state; only attention is served"
        )
    refuse_by_configuration(name, config.to_dict())


def refuse_by_configuration(name: str, config: dict[str, Any]) -> None:
    """Raise `UnsupportedModel` for settings, in the model's dict, that cannot be served exactly."""
    reasons = {
        "is an encoder-decoder": config.get("is_encoder_decoder"),
        "shares KV between layers": config.get("num_kv_shared_layers"),
        "attends in both directions": config.get("use_bidirectional_attention"),
        "reads images": config.get("vision_config"),
        "reads audio": config.get("audio_config"),
        "is a quantized checkpoint": config.get("quantization_config"),
        "has no layers": (layers := config.get("num_hidden_layers")) is not None and layers < 1,
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedModel(f"{name} {reason}, which Tandem does not serve")
    other = sorted(set(config.get("layer_types") or ()) - _EXACT_LAYERS)
    if other:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(other)}; only full and sliding-window "
            "attention are served"
        )


def exact_model_length(name: str, config: dict[str, Any], asked: int) -> int:
    """Longest context in tokens that is exact. `asked` is the user's limit (0: the model's own).

    `dynamic` and `longrope` rotary embeddings change with the longest sequence of the batch, so
    sequences would affect each other. They are exact only up to the length at which the change
    begins. Raises `InvalidRequest`, `UnsupportedModel`.
    """
    own = config.get("max_position_embeddings") or config.get("n_positions") or asked
    if not own or own < 0:
        raise InvalidRequest(f"{name} names no maximum length; set model.max_model_len")
    if asked > own:
        raise InvalidRequest(
            f"model.max_model_len is {asked}, but {name} was made for at most {own} tokens",
            param="max_model_len",
        )
    length = int(asked or own)
    for kind, limit in _changing_rotary(config):
        if length > limit:
            raise UnsupportedModel(
                f"{name} has {kind} rotary embeddings, which depend on the longest sequence of "
                f"the batch beyond {limit} tokens; set model.max_model_len to {limit} or less"
            )
    return length


def _changing_rotary(config: dict[str, Any]) -> list[tuple[str, int]]:
    """(kind, last exact length) of every rotary embedding that depends on the batch."""
    parameters = config.get("rope_parameters") or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    found = []
    for entry in nested or [parameters]:
        kind = str(entry.get("rope_type", "default"))
        if kind in _LENGTH_DEPENDENT_ROPE:
            own = int(config["max_position_embeddings"])
            original = entry.get("original_max_position_embeddings")
            found.append((kind, int(original or own) if kind == "longrope" else own))
    return found

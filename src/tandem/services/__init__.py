"""Use cases behind the HTTP surface: text in, text out, over the `EngineClient` port.

Text, names, keys and queue limits live here; the engine below knows token ids only and the API
above knows HTTP only. Invariant: nothing here imports an engine or a web framework.
"""

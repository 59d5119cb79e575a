"""The HTTP surface: OpenAI-compatible routes over the services.

Knows HTTP, JSON and OpenAI's shapes; decides nothing about generation. Invariant: every answer
that is not a success has OpenAI's error shape.
"""

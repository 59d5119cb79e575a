"""Anthropic's dialect: /v1/messages, translated to chats and back. Invariant: generates nothing."""

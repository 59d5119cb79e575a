"""OpenAI's newer dialect: /v1/responses, as chats and back. Invariant: stores no answer."""

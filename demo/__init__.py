"""Everything needed to rebuild the small chat model that ships with Tandem.

`corpus` writes dialogues, `train` fits the tokenizer and the network, `evaluate` checks held-out
requests. Nothing here is imported by the server.
"""

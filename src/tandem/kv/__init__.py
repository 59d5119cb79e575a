"""The logical KV cache: which block holds what, who owns it, what goes first. No tensors.

`cache.KVCache` is the face that scheduling sees; the physical blocks live in `executor`.
"""

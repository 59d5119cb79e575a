"""The logical KV cache: what each block contains, who holds it, what is evicted first. No tensors.

Scheduling uses `cache.KVCache` only. The physical blocks are in `executor`.
"""

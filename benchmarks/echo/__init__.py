"""Echo's figures 6 to 11: offline batches beside online requests, simulated at the paper's scale.

`measured` has the same on the real engine. Source: Echo, sections 6 and 7. Invariant: every policy
gets the same online requests at the same times and the same offline requests in the same order.
"""

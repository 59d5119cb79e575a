"""How far off the time model is, on held-out samples and on a loop that serves."""

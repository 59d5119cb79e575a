"""How far log-probabilities move because of what shares their passes."""

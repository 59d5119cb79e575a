"""What an iteration spends outside of the model."""

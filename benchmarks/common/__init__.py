"""What studies share: the machine's description, paired intervals, recorded preferences."""

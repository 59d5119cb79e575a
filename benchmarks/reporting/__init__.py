"""What studies report with: the machine that was measured, and paired intervals."""

"""What a decision of the scheduler costs."""

"""Predicts the cost of work from past costs. No torch, no policy, no clock."""

"""Predicts what work costs, from what it cost before. No torch, no policy, no clock."""

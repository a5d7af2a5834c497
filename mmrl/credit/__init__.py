"""Rewards to groups to advantages and weights: plain numbers in, plain numbers out."""

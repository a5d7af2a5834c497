"""Engines: prompt token ids in, sampled token ids and log-probabilities out."""

"""Agents that reason, search and answer inside one growing context, and their rewards."""

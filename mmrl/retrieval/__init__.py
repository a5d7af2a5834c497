"""Retrievers: queries in, ranked documents out."""

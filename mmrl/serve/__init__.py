"""A policy behind an OpenAI-compatible server: requests in, completions of any engine out."""

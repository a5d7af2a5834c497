"""Stages: each maps a policy to a better one."""

"""Optimisation of prompts: DSPy's optimisers on mmrl's rollouts"""

"""Models behind the protocols of OpenAI and Anthropic: a policy that is served, and rollouts that are recorded."""

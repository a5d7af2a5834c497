"""vLLM as an engine: a managed or given server, or inside the training process."""

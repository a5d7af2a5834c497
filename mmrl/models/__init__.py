"""Models: loading of weights and tokenizers, chat rendering, policies, and which module uses which weights."""

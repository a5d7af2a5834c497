"""The embedded engine: a continuous batcher and decode loop in this process, on the model that is trained."""

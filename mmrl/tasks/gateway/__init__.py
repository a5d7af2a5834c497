"""An agent that calls a model by HTTP as the program of a task: its requests are recorded calls."""

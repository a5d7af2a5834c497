"""Any `dspy.Module` as a program of rollouts. Importing what is in here imports DSPy, which takes seconds."""

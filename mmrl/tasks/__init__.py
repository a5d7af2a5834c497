"""Tasks: data, program, tools, reward."""

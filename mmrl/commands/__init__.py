"""Commands that read runs or serve a policy, and prepare them: credit, doctor, export, index, plan, serve."""

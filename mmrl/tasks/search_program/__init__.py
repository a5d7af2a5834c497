"""The three-agent search program of MHGPO and the multi-hop tasks that it answers."""

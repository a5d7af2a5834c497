"""What a run leaves: its directory, journal and forests on disk, the policies that it saved, the machine it ran on."""

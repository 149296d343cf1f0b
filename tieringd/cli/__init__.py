"""The `tieringd` command."""

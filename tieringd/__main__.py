"""`python -m tieringd` is the `tieringd` command."""

from tieringd.cli.main import main

main()

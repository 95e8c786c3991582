"""`python -m dynaflow`: the `dynaflow` command, wherever its script is."""

from dynaflow.cli import main

main()

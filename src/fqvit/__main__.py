"""`python -m fqvit` is the command `fqvit`."""

from fqvit.cli import main

main()

"""`python -m adp2sgd`."""

from adp2sgd.cli import main

main()

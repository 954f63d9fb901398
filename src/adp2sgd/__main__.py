"""`python -m adp2sgd`."""

from adp2sgd.cli.main import main

main()

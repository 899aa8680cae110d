"""`python -m homing.cli`, for machines where no entry point can be installed."""

from homing.cli.main import main

main()

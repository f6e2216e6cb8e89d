"""`python -m ortgpt` is the command `ortgpt`."""

from ortgpt.cli.main import main

main(prog_name="ortgpt")

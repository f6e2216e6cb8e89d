"""`python -m ortgpt` is the command `ortgpt`."""

from ortgpt.cli import main

main(prog_name="ortgpt")

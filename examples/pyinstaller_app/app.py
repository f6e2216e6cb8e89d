"""A program that becomes one file: continue a prompt, by a grammar if one is given. Needs no Python where it runs."""

import argparse
import sys

import ortgpt
from ortgpt.cli.main import main as ortgpt_command


def main() -> None:
    """Write a text, or with `ortgpt` as the first word do what that command does: `app ortgpt doctor`."""
    if sys.argv[1:2] == ["ortgpt"]:
        ortgpt_command(sys.argv[2:], prog_name="app ortgpt")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("tokens", type=int, nargs="?", default=40)
    parser.add_argument("--grammar", metavar="REGEX", help="a regular expression that the text must match as a whole")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(encoding="utf-8")  # also where the system has another encoding, as Windows has
    try:
        with ortgpt.load("austen") as generator:
            options = {"grammar": arguments.grammar} if arguments.grammar else {"temperature": 0.8, "top_p": 0.95}
            for piece in generator.stream(arguments.prompt, max_new_tokens=arguments.tokens, seed=7, **options):
                print(piece.text, end="", flush=True)
        print()
    except ortgpt.OrtGptError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()

"""Stream a continuation to the terminal: `python stream.py [PROMPT] [TOKENS] [SEED]`. Ctrl-C ends it cleanly."""

import sys

import ortgpt


def main(prompt: str = "It is a truth universally acknowledged,", tokens: str = "120", seed: str = "7") -> None:
    with ortgpt.load("austen") as generator:  # the bundle inside the package; or a path to your own
        pieces = generator.stream(
            prompt,
            max_new_tokens=int(tokens),
            context_overflow="slide",  # a text longer than the model's context drops its beginning and goes on
            temperature=0.8,
            top_p=0.95,
            seed=int(seed),
        )
        print(prompt, end="", flush=True)
        # A piece holds whole characters, never half of one, so each can be printed when it comes.
        for piece in pieces:
            print(piece.text, end="", flush=True)  # without flush the terminal would show whole lines only
        print()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        print()  # the shell's next prompt begins on its own line
        sys.exit(130)  # what shells expect of a program that Ctrl-C ended
    except ortgpt.OrtGptError as error:  # a bad option or a missing bundle: one line instead of a traceback
        sys.exit(f"stream.py: {error}")

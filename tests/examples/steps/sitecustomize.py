"""Count the steps of every generation in a process, from outside of the program that is run.

Python imports this module at its start where this folder is in PYTHONPATH. Each step (one token of one sequence)
appends a byte to the file named in STEP_FILE and then takes STEP_SECONDS longer, so that a test can tell "within a
step" from "a little later". Each load of a bundle appends the process's id and the `threads` it was given to the file
STEP_FILE.loads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import ortgpt

_FILE = os.open(os.environ["STEP_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
_SECONDS = float(os.environ.get("STEP_SECONDS", "0"))


def count(ids: Any, logits: Any) -> Any:
    os.write(_FILE, b".")
    time.sleep(_SECONDS)
    return logits


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: ortgpt.Generator, *args: Any, **options: Any) -> Any:
        options.setdefault("logits_processor", count)  # astream() may call stream(), which must not count again
        return method(self, *args, **options)

    return call


def recorded(load: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with open(f"{os.environ['STEP_FILE']}.loads", "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {options.get('threads')}\n")
        return load(*args, **options)

    return call


ortgpt.load = recorded(ortgpt.load)
for _name in ("generate", "generate_batch", "stream", "agenerate", "astream"):
    setattr(ortgpt.Generator, _name, counted(getattr(ortgpt.Generator, _name)))

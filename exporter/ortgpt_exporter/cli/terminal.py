"""What the commands of the exporter share: flags of declared settings, progress bar, notes, and errors in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from ortgpt.cli.streams import printable
from ortgpt.ort.package import install_hint
from ortgpt_models.errors import ModelError
from ortgpt_models.progress import Progress

_EXTRA_OF = {
    **dict.fromkeys(
        ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "tokenizers", "huggingface_hub", "httpx2"), "export"
    ),
    "matplotlib": "plot",
    "optimum": "optimum",
    "peft": "lora",
}


def add_flags(command: Any, settings: Iterable[dataclasses.Field[Any]]) -> Any:
    """Add a flag for each setting that a dataclass declares."""
    for setting in reversed([*settings]):
        metadata = setting.metadata
        flag = metadata.get("flag") or f"--{setting.name.replace('_', '-')}"
        kind: Any = metadata.get("kind") or type(setting.default)
        if kind is bool and setting.default is None:
            flag += f"/--no-{flag.removeprefix('--')}"
        if kind is str:
            kind = click.Choice(metadata["choices"])
        elif kind is Path:
            kind = click.Path(path_type=Path)
        values = {"is_flag": True} if kind is bool else {"type": kind}
        values["default"] = setting.default
        command = click.option(
            flag, setting.name, help=metadata["help"], show_default=setting.default is not None, **values
        )(command)
    return command


def set_flags(options: Mapping[str, Any]) -> list[str]:
    """Return the flags of the options that the command line set."""
    names = [name for name, value in options.items() if value is not None and value is not False]
    return ["--eval" if name == "eval_text" else f"--{name.replace('_', '-')}" for name in names]


def show_progress(bar: Any, progress: Progress) -> None:
    """Let a progress bar say what `progress` does."""
    bar.length = progress.total
    bar.label = progress.activity
    bar.update(progress.done - bar.pos)


def write_note(note: str) -> None:
    """Write a line to stderr, above the progress bar if one is visible."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    click.echo(clear + printable(note), err=True)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn ModelError into one line, and a missing extra into the command that installs it.

    SIGTERM and SIGHUP unwind like Ctrl-C, so that unfinished files are removed.
    """
    ends = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # no SIGHUP on Windows
    main = threading.current_thread() is threading.main_thread()
    # A signal that is ignored, as nohup does with SIGHUP, stays ignored.
    before = {end: signal.signal(end, _end) for end in ends if main and signal.getsignal(end) is not signal.SIG_IGN}
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = _EXTRA_OF.get(package)
        if extra is None:
            raise
        # Optimum pins an old transformers.
        place = ", in an environment of its own" if extra == "optimum" else ""
        extras = [extra] if importlib.util.find_spec("onnxruntime") else ["cpu", extra]
        raise click.ClickException(
            f"this command needs {package}, which is not installed; {install_hint(*extras)}{place}"
        ) from error
    except ModelError as error:
        raise click.ClickException(printable(str(error), kept="\n")) from error
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def progress_bar(label: str) -> Any:
    """Return a progress bar on stderr, hidden unless that is a terminal."""
    return click.progressbar(length=1, label=label, file=sys.stderr, hidden=not sys.stderr.isatty(), show_eta=True)

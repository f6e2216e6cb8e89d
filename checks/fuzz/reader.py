"""Read damaged input in a process of its own, with limits on time and memory, and classify what comes of it."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import resource
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import ortgpt
from fuzz.values import MANIFEST
from ortgpt import OrtGptError
from ortgpt.bundle.checked_json import read_json_object
from ortgpt.bundle.folder import open_bundle
from ortgpt.bundle.model_config import ModelConfig
from ortgpt.cli.report import info_lines
from ortgpt.options.generation_config import read_generation_config
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.text.byte_level_bpe import ByteLevelBPE
from ortgpt.tools.seal import seal_bundle

BUNDLE = "bundle"  # the kind of input that is not a single file
LIMIT_S = 5.0
START_S = 60.0  # until a new process has imported everything
LIMIT_BYTES = 2**30
ADDRESS_SPACE_BYTES = 12 * 2**30  # so that a process that allocates without end leaves the machine some memory
TEXT = "It is a truth universally acknowledged; whatever is known,"  # 39 tokens: enough for a prefill graph
ACCEPTED, FINDING = "accepted", "finding"

Answer = tuple[str, str]  # ACCEPTED, FINDING or the name of an error; and what was read, or what went wrong


# In the process that reads


def read_input(kind: str, folder: Path) -> str:
    """Read the input in the folder as an app would, and return the result as a text."""
    if kind == MANIFEST:
        bundle = open_bundle(folder)
        info_lines(bundle)
        seal_bundle(folder)
        assert open_bundle(folder).config == bundle.config, "a seal that changes the bundle"
        return repr(bundle.manifest)
    if kind == "config.json":
        return repr(ModelConfig.from_dict(read_json_object(folder / kind)))
    if kind == "generation_config.json":
        defaults = read_generation_config(read_json_object(folder / kind), (0,))
        return repr(GenerationOptions(max_new_tokens=3).resolve(defaults))
    if kind in ("vocab.json", "merges.txt"):
        tokenizer = ByteLevelBPE.load(folder)
        ids = tokenizer.encode(TEXT)
        assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids), "ids beyond the vocabulary"
        assert tokenizer.decode(ids) == TEXT, "a text that does not come back"
        return repr(ids)
    with ortgpt.load(folder, verify="sha256", threads=1) as generator:
        completion = generator.generate(TEXT, max_new_tokens=3)
        vocab_size = generator.bundle.config.vocab_size
        assert all(0 <= token_id < vocab_size for token_id in completion.token_ids), "ids beyond the vocabulary"
        return repr(completion.token_ids)


def classify(kind: str, folder: Path) -> Answer:
    """Read an input, and return what came of it; every exception but an error of the package is a finding."""
    before, printed = _reset_peak(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            answer: Answer = (ACCEPTED, read_input(kind, folder))
    except OrtGptError as error:
        message = str(error)
        readable = message.encode("utf-8", "backslashreplace").decode()
        if readable == message:
            answer = (type(error).__name__, "")
        else:
            answer = (FINDING, f"a message that is not UTF-8: {readable[:300]}")
    except BaseException as error:  # noqa: BLE001  # a panic of Rust code is not an Exception
        answer = (FINDING, f"{_place_of(error)}: {type(error).__name__}: {str(error)[:200]!a}")
    growth = _peak_bytes() - before
    if printed.getvalue():
        answer = (FINDING, f"printed {printed.getvalue()[:200]!a}")
    return (FINDING, f"{growth / 2**20:.0f} MiB of memory") if growth > LIMIT_BYTES else answer


def serve(connection: Connection) -> None:
    """Classify each input until the other end closes."""
    logging.getLogger("ortgpt").addHandler(logging.NullHandler())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the messages of ONNX Runtime
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    connection.send(("ready", ""))
    while True:
        try:
            kind, folder = connection.recv()
        except EOFError:
            return
        connection.send(classify(kind, Path(folder)))


def _reset_peak() -> int:
    """Reset the peak of resident memory, as Linux allows, and return the new one in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the package that an exception passed."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "ortgpt" in Path(frame.filename).parts] or frames
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno} {inside[-1].name}()"


# In the process that asks


class Reader:
    """A process that reads inputs. If it dies or is stopped, a new one is started for the next input."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def ask(self, kind: str, folder: Path) -> Answer:
        """Return what came of an input, or how the process ended."""
        answer = self._exchange(self._connect(), (kind, str(folder)), LIMIT_S)
        if answer[0] == FINDING:
            self.close()  # so that the next input gets a process in a known state
        return answer

    @property
    def pid(self) -> int | None:
        """The id of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def _connect(self) -> Connection:
        if self._connection is None:
            mine, theirs = self._context.Pipe()
            self._process = self._context.Process(target=serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            self._connection = mine
            ready = self._exchange(mine, None, START_S)
            assert ready[0] == "ready", ready
        return self._connection

    def _exchange(self, connection: Connection, question: tuple[str, str] | None, limit_s: float) -> Answer:
        assert self._process is not None
        try:
            if question is not None:
                connection.send(question)
            if connection.poll(limit_s):
                kind, text = connection.recv()
                return str(kind), str(text)
        except (EOFError, ConnectionError):
            self._process.join(LIMIT_S)
            code = self._process.exitcode or 0
            return FINDING, f"the process died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        return FINDING, f"no answer in {limit_s:g} s"

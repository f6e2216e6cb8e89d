"""Run the programs of examples/ for real: `python checks/examples.py [NAME...] [--keep] [--wheel FILE]`.

Each example is copied to a folder of its own and runs in an environment of its own: the project's wheel with [cpu] and
the example's requirements, nothing else. Servers listen on 127.0.0.1; clients read, send bad options, and leave. What
an example wrote is compared with what the runtime gives for the same prompt, options and seed. The steps of the model
are counted from outside (tests/examples/steps): when a client leaves, the count must stop. Prints a line for each
example, writes build/examples/NAME.txt, and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
ENVIRONMENTS = ROOT / ".venv-examples"
BUILD = ROOT / "build" / "examples"
STEPS = ROOT / "tests" / "examples" / "steps"

PROMPT = "It is a truth"
LONG = {"prompt": PROMPT, "max_new_tokens": 5000, "seed": 7}  # more than any check waits for
STEP_SECONDS = 0.1  # a step takes so much longer: far more than a client's leaving takes to arrive

ORACLE = """
import json, sys, ortgpt
with ortgpt.load("austen") as generator:
    for prompt, options in json.load(sys.stdin):
        print(json.dumps(generator.generate(prompt, **options).text))
"""

GRADIO_CLIENT = """
import json, os, sys, time
from gradio_client import Client

def begin(*arguments):
    return client.submit(*arguments, api_name="/write")

def leave(how):
    job = begin("It is a truth", 2000, 0.8, 7)
    while len(job.outputs()) < 3:
        time.sleep(0.02)
    before = os.path.getsize(os.environ["STEP_FILE"])
    how(job)
    return before

client = Client(sys.argv[1], verbose=False, analytics_enabled=False)
if sys.argv[2] == "read":
    try:
        begin("It is a truth", 12, 0.8, -1).result()
    except Exception as error:
        print(json.dumps([list(begin("It is a truth", 12, 0.8, 7)), str(error)]))
elif sys.argv[2] == "stop":
    print(leave(lambda job: job.cancel()), flush=True)
else:
    leave(lambda job: (print(os.path.getsize(os.environ["STEP_FILE"]), flush=True), os._exit(0)))
"""


class ExampleError(Exception):
    """An example did not do what it should."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise ExampleError(what)


@dataclass(frozen=True)
class Place:
    """Where one example runs: a copy of its folder, and the Python that has what it needs."""

    folder: Path
    python: Path

    @property
    def step_file(self) -> Path:
        return self.folder / "steps"

    def steps(self) -> int:
        return self.step_file.stat().st_size if self.step_file.exists() else 0

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the environment variables of a program here: those of this process, and its steps counted."""
        path = os.pathsep.join(filter(None, [str(STEPS), os.environ.get("PYTHONPATH")]))
        home = {"HOME": str(self.folder), "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"}
        own = {
            name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
        }  # which hides a lost flush
        return own | home | {"PYTHONPATH": path, "STEP_FILE": str(self.step_file)} | extra

    def run(self, *command: str | Path, text: str | None = None, **extra: str) -> str:
        """Run a command here and return its standard output. Raises ExampleError, with both outputs, where it fails."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ(**extra), input=text, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise ExampleError(
                f"{shlex.join(map(str, command))} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    @contextmanager
    def beginning(self, *command: str | Path, **extra: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
        """Start a command here, and give it and what it writes; end it with the block, or after a minute."""
        process = subprocess.Popen(
            command, cwd=self.folder, env=self.environ(**extra), text=True, encoding="utf-8",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=allow_interrupts,
        )  # fmt: skip
        assert process.stdout is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            yield process, process.stdout
        finally:
            timer.cancel()
            process.kill()
            process.communicate()

    def expected(self, *calls: tuple[str, dict[str, Any]]) -> list[str]:
        """Return what the runtime itself continues each prompt with, with the options beside it."""
        return [json.loads(line) for line in self.run(self.python, "-c", ORACLE, text=json.dumps(calls)).splitlines()]

    @contextmanager
    def serving(
        self, address: str, *command: str | Path, **extra: str
    ) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
        """Run a server until the block ends; give the port that its log names by the pattern `address`."""
        log = self.folder / "server.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environ(STEP_SECONDS=str(STEP_SECONDS), **extra),
                stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not (named := re.search(address, log.read_text())):
                expect(process.poll() is None and time.monotonic() < deadline, f"no server:\n{log.read_text()}")
                time.sleep(0.1)
            yield int(named[1]), process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def expect_leaving_ends(self, before: int, limit: int, what: str) -> int:
        """Wait until no step is counted any more; there may be `limit` behind the `before` of the client's leaving."""
        time.sleep(10 * STEP_SECONDS)
        after = self.steps()
        time.sleep(10 * STEP_SECONDS)
        expect(before > 0 and self.steps() == after, f"{what}: the generation goes on")
        expect(after - before <= limit, f"{what}: {after - before} steps more (accepted: {limit})")
        return after - before


def allow_interrupts() -> None:
    """Let a child process be interrupted even where this one was started in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- one function an example: returns its transcript, and what to say of it in a line


def terminal(place: Place) -> tuple[str, str]:
    program = place.folder / "stream.py"
    options = {"context_overflow": "slide", "temperature": 0.8, "top_p": 0.95, "seed": 7}
    (want,) = place.expected((PROMPT, options | {"max_new_tokens": 60}))
    written = place.run(place.python, program, PROMPT, "60")
    expect(written == f"{PROMPT}{want}\n", f"wrote {written!r}, not {PROMPT + want!r}")

    before = place.steps()
    slow = {"STEP_SECONDS": str(STEP_SECONDS)}
    with place.beginning(place.python, program, PROMPT, "100000", **slow) as (process, output):
        begun = output.read(len(PROMPT) + 8)  # returns while the program writes: the text comes in pieces
        shown = place.steps() - before
        expect(process.poll() is None and shown < 20, f"nothing was written before step {shown}")
        process.send_signal(signal.SIGINT)
        rest = output.read()
        status = process.wait()
    expect(status == 130, f"Ctrl-C: exit code {status}")
    expect("Traceback" not in rest and rest.endswith("\n"), f"Ctrl-C: wrote {rest!r}")
    after = place.expect_leaving_ends(before + shown, 2, "Ctrl-C")

    with place.beginning(place.python, program, PROMPT, "0") as (process, output):
        refusal, status = output.read(), process.wait()
    expect(status == 1, f"a bad option: exit code {status}")
    expect(refusal == "stream.py: max_new_tokens = 0 (accepted: an integer of 1 or more)\n", f"wrote {refusal!r}")
    transcript = (
        f"$ python stream.py {PROMPT!r} 60\n{written}\n$ python stream.py {PROMPT!r} 100000\n{begun}{rest.rstrip()}\n"
        f"(Ctrl-C: exit code 130)\n\n$ python stream.py {PROMPT!r} 0\n{refusal}"
    )
    return transcript, f"Ctrl-C ended it {after} steps later"


def fastapi_server(place: Place) -> tuple[str, str]:
    transcript: list[str] = []
    (want,) = place.expected((PROMPT, {"max_new_tokens": 20, "seed": 7, "context_overflow": "slide"}))
    job = {"prompt": PROMPT, "max_new_tokens": 20, "seed": 7}
    with place.serving(r"running on http://127\.0\.0\.1:(\d+)", place.python, "app.py", PORT="0") as (port, process):
        ask = Client(port, transcript)
        status, _, body = ask.post("/generate", job)
        expect((status, json.loads(body)) == (200, {"text": want, "finish_reason": "length"}), f"{status} {body}")
        status, headers, body = ask.post("/stream", job)
        expect(status == 200 and headers["content-type"].startswith("text/event-stream"), f"{status} {headers}")
        events = [json.loads(data) for data in re.findall(r"^data: (.*)$", body, re.MULTILINE)]
        expect("".join(event["text"] for event in events) == want, f"the events are {body}")
        expect([event["finish_reason"] for event in events] == [None] * 19 + ["length"], f"the events are {body}")
        for path in ("/stream", "/generate"):
            for bad, status, kind, words in (
                ({"temperature": -1}, 400, "OptionError", "temperature = -1.0 (accepted: a number from 0 to 1e30)"),
                ({"temprature": 1}, 422, "RequestError", "temprature"),
                ({"max_new_tokens": 10**9}, 422, "RequestError", "less than or equal to 20000"),
            ):
                ask.expect_refusal(path, {"prompt": PROMPT} | bad, status, kind, words)

        more = [
            place.expect_leaving_ends(ask.leave(place, "/stream", read=40), 2, "left a stream"),
            place.expect_leaving_ends(ask.leave(place, "/stream"), 2, "left before the first event"),
            place.expect_leaving_ends(ask.leave(place, "/generate"), 2, "left /generate"),
        ]

        # All slots are back: two generations run at a time, and a third is told to come back.
        first, second = ask.open("/stream", LONG), ask.open("/stream", LONG)
        started = time.monotonic()
        status, headers, body = ask.post("/stream", job)
        expect((status, headers.get("retry-after")) == (429, "1"), f"a third generation: {status} {headers} {body}")
        expect(json.loads(body)["error"]["type"] == "Too Many Requests", f"a third generation: {body}")
        expect(time.monotonic() - started < 10, "a third generation waited too long")
        ask.close(first)
        status, _, body = ask.post("/generate", job)
        expect((status, json.loads(body)["text"]) == (200, want), f"after one has left: {status} {body}")
        ask.close(second)

        running = ask.open("/stream", LONG)
        before, started = place.steps(), time.monotonic()
        process.terminate()
        rest = running[1].read().decode()
        expect(
            '"finish_reason": "cancelled"' in rest.splitlines()[-2], f"shutdown: the stream ended with {rest[-200:]!r}"
        )
        process.wait(10)
        shutdown_s = time.monotonic() - started
        place.expect_leaving_ends(before, 3, "shutdown")
    transcript.append("(SIGTERM while a stream runs; its last event:)\n" + rest.splitlines()[-2])
    return "\n\n".join(transcript), f"{max(more)} steps after a client left, {shutdown_s:.1f} s to shut down"


def flask_gunicorn(place: Place) -> tuple[str, str]:
    transcript: list[str] = []
    options = {"max_new_tokens": 20, "context_overflow": "slide"}
    want = place.expected(*((PROMPT, options | {"seed": seed}) for seed in range(8)))
    job = {"prompt": PROMPT, "max_new_tokens": 20}
    command: list[str | Path] = [place.python.parent / "gunicorn", "--bind", "127.0.0.1:0", "app:create_app()"]
    with place.serving(r"Listening at: http://127\.0\.0\.1:(\d+)", *command, CPUS="2") as (port, process):
        ask = Client(port, transcript)
        status, _, body = ask.post("/generate", job | {"seed": 7})
        expect((status, json.loads(body)) == (200, {"text": want[7], "finish_reason": "length"}), f"{status} {body}")
        status, _, body = ask.post("/stream", job | {"seed": 7})
        expect((status, body) == (200, want[7]), f"{status} {body}")
        for bad, kind, words in (
            ({"temperature": -1}, "OptionError", "temperature = -1 (accepted: a number from 0 to 1e30)"),
            ({"temprature": 1}, "Bad Request", "unknown: temprature"),
            ({"max_new_tokens": 10**9}, "Bad Request", "accepted: up to 20000"),
        ):
            ask.expect_refusal("/stream", {"prompt": PROMPT} | bad, 400, kind, words)

        with ThreadPoolExecutor(8) as pool:  # two workers, four threads each
            found = list(pool.map(lambda seed: Client(port, []).post("/generate", job | {"seed": seed})[2], range(8)))
        expect([json.loads(body)["text"] for body in found] == want, "eight requests at once give other texts")
        log = (place.folder / "server.log").read_text()
        workers = [int(pid) for pid in re.findall(r"Booting worker with pid: (\d+)", log)]
        loads = Path(f"{place.step_file}.loads").read_text().split("\n")[1:-1]  # without that of expected()
        expect(
            sorted(loads) == sorted(f"{pid} 1" for pid in workers), f"workers {workers} loaded (id, threads): {loads}"
        )

        # WSGI tells of a client that has left when the server fails to send: with the second piece after it.
        more = place.expect_leaving_ends(ask.leave(place, "/stream", read=10), 4, "left a stream")
        started = time.monotonic()
        status, _, body = ask.post("/generate", LONG | {"max_new_tokens": 20_000})
        waited_s = time.monotonic() - started
        expect((status, json.loads(body)["finish_reason"]) == (200, "timeout"), f"a long request: {status} {body}")
        expect(24 < waited_s < 30, f"a long request was answered after {waited_s:.1f} s")
        running = ask.open("/stream", LONG)
        started = time.monotonic()
        process.terminate()
        process.wait(20)
        shutdown_s = time.monotonic() - started
        ask.close(running)
        place.expect_leaving_ends(place.steps(), 0, "shutdown")
        expect(not any(map(is_running, workers)), "a worker outlives the server")
        transcript[-1] = f"{transcript[-1][:200]} ...\n(ended by timeout_s after {waited_s:.1f} s)"
    return "\n\n".join(transcript), f"{more} steps after a client left, {shutdown_s:.1f} s to shut down"


def gradio_page(place: Place) -> tuple[str, str]:
    (want,) = place.expected(
        (PROMPT, {"max_new_tokens": 12, "temperature": 0.8, "seed": 7, "context_overflow": "slide"})
    )
    command: list[str | Path] = [
        place.python,
        "-u",
        "app.py",
    ]  # -u: its address goes to a file here, which Python would buffer
    with place.serving(r"local URL:\s+http://127\.0\.0\.1:(\d+)", *command) as (port, process):
        address = f"http://127.0.0.1:{port}"

        def client(what: str) -> str:
            return place.run(place.python, "-c", GRADIO_CLIENT, address, what)

        states, refusal = json.loads(client("read").splitlines()[-1])
        expect(states[-1] == PROMPT + want, f"the page shows {states[-1]!r}, not {PROMPT + want!r}")
        expect(len(states) > 8 and states == sorted(states, key=len), f"the page shows {states}")
        expect("seed = -1 (accepted: " in refusal, f"a bad option: {refusal!r}")
        stopped = place.expect_leaving_ends(int(client("stop").split()[-1]), 5, "Stop")
        left = place.expect_leaving_ends(int(client("leave").split()[-1]), 5, "left the page")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/")
        page = connection.getresponse().read().decode()
        expect("fonts.googleapis.com" not in page.replace("preconnect", ""), "the page loads fonts from Google")
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    shown = "\n".join(["(what the page shows, as it changes:)", *map(repr, states), f"(with the seed -1:)\n{refusal}"])
    return shown, f"{stopped} steps after Stop, {left} after a page was left"


def language_model(calls: tuple[str, str, str], place: Place) -> tuple[str, str]:
    """Run llm.py of LangChain or of LlamaIndex: both show the same, under the names of their `calls`."""
    options = {"max_new_tokens": 24, "temperature": 0.8, "seed": 7}
    prompts: list[tuple[str, dict[str, Any]]] = [
        (PROMPT, options), (PROMPT, options | {"stop": ","}), ("Dear Jane,", options),
        ("My dear", options), ("She was", options),
    ]  # fmt: skip
    whole, stopped, letter, *two = place.expected(*prompts)
    before = place.steps()
    written = place.run(place.python, "llm.py", STEP_SECONDS=str(STEP_SECONDS))
    steps = place.steps() - before
    whole_call, stream_call, parts = calls
    want = (
        f"{whole_call}: {whole}\nstop: {stopped}\n{stream_call}: {letter}\nat once: {two!r}\n"
        f"left after 5 {parts}\nerror: temperature = -1 (accepted: a number from 0 to 1e30)\n"
    )
    expect(written.replace("|", "") == want, f"wrote {written!r}, not {want!r}")
    expect(written.count("|") > 10, f"did not stream: {written!r}")
    # Four texts of 24 tokens, one up to its stop string, and five pieces of a stream of 5,000 tokens.
    expect(101 < steps < 120, f"{steps} steps: the stream that was left went on")
    return f"$ python llm.py\n{written}", f"{steps} steps in all: a stream of 5,000 was left after 5"


def notebook(place: Place) -> tuple[str, str]:
    place.run(place.python.parent / "jupyter-execute", "--output", "executed.ipynb", "tour.ipynb")
    return check_cells(place, json.loads((place.folder / "executed.ipynb").read_text(encoding="utf-8")))


def check_cells(place: Place, executed: dict[str, Any]) -> tuple[str, str]:
    """Compare an executed notebook with what the runtime gives."""
    texts = {
        cell["id"]: "".join("".join(output["text"]) for output in cell["outputs"])
        for cell in executed["cells"]
        if cell["cell_type"] == "code"
    }
    options = {"max_new_tokens": 40, "temperature": 0.8}
    prompt = "It is a truth universally acknowledged,"
    one, other = place.expected(
        (prompt, options | {"top_p": 0.95, "seed": 7}), ("My dear Mr. Bennet,", options | {"seed": 3})
    )
    expect(texts["generate"] == f"{one}\nlength 40\n", f"generate: {texts['generate']!r}")
    expect(texts["stream"] == other, f"stream: {texts['stream']!r}")
    expect(len(texts["logprobs"].splitlines()) == 5, f"logprobs: {texts['logprobs']!r}")
    likely, strange = (float(line.split()[0]) for line in texts["score"].splitlines())
    expect(0.5 < likely < strange < 5, f"score: {texts['score']!r}")
    expect([line[5:] for line in texts["choose"].splitlines()] == [" good girl", " green potato"], texts["choose"])
    first, rewound = texts["conversation"].split("---\n")
    expect(first.startswith(rewound.rstrip("\n")) and " Yesterday" in first.removeprefix(rewound.rstrip("\n")),
           f"conversation: {texts['conversation']!r}")  # fmt: skip
    return "\n".join(f"[{name}]\n{text}" for name, text in texts.items()), f"{len(texts)} cells"


def docker(place: Place) -> tuple[str, str]:
    """Run the Dockerfile's steps outside Docker, in a bare folder: /src, /wheel and /venv are folders in it."""
    root = place.folder / "root"
    (root / "home").mkdir(parents=True)
    if (place.folder / "austen").exists():
        (root / "home" / "austen").symlink_to(place.folder / "austen")

    def inside(text: str) -> str:
        return re.sub(r"(?<![\w./-])/(src|wheel|venv)(?![\w-])", lambda path: f"{root}{path[0]}", text)

    instructions = re.findall(r"^([A-Z]+) +(.*)$", (place.folder / "Dockerfile").read_text(), re.MULTILINE)
    wanted = (place.folder / "Dockerfile.dockerignore").read_text().splitlines()
    # The slim image's `python` and `pip` are here those of the example's environment; /venv takes nothing from it.
    environ = {"PATH": f"{place.python.parent}{os.pathsep}{os.defpath}"} | package_index()
    command: list[str] = []
    transcript: list[str] = []
    for name, text in instructions:
        if (name, text) == ("COPY", ". /src"):
            (root / "src").mkdir()
            for line in wanted:
                if line.startswith("!"):
                    copy(ROOT / line[1:], root / "src" / line[1:])
        elif name == "RUN":
            done = subprocess.run(
                inside(text), shell=True, cwd=root / "home", env=environ, capture_output=True, text=True
            )
            expect(done.returncode == 0, f"RUN {text}:\n{done.stdout}{done.stderr}")
        elif name == "ENV":
            expect(text == "PATH=/venv/bin:$PATH", f"unknown: ENV {text}")
            environ = {"PATH": f"{root}/venv/bin"}  # what the second stage has: nothing of the first but /venv
        elif name in ("ENTRYPOINT", "CMD"):
            command += json.loads(text)
        else:
            expect(name in ("FROM", "USER") or text == "--from=build /venv /venv", f"unknown: {name} {text}")
            continue
        transcript.append(f"{name} {text}")
    done = subprocess.run([root / "venv/bin" / command[0], *command[1:]], cwd=root / "home", env=environ,
                          capture_output=True, text=True)  # fmt: skip
    expect((done.returncode, done.stderr) == (0, ""), f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    (want,) = place.expected(image_call(command))
    expect(done.stdout == f"{want}\n", f"wrote {done.stdout!r}, not {want!r}")
    packages = next((root / "venv/lib").glob("python3*/site-packages"))
    names = {path.name for path in packages.iterdir()}
    expect(not names & {"torch", "onnx", "transformers", "pip"}, f"the environment has {sorted(names)}")
    size_mb = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) / 1e6
    transcript += [f"$ {shlex.join(command)}", done.stdout]
    return "\n".join(transcript), f"{size_mb:.0f} MB in /venv; the image itself was not built"


def pyinstaller_app(place: Place) -> tuple[str, str]:
    """Build the app into one file, and run it in an empty folder with an empty environment, as on a bare machine."""
    command: list[str | Path] = [place.python, "-m", "PyInstaller", "--onefile", "app.py"]
    done = subprocess.run(command, cwd=place.folder, capture_output=True, encoding="utf-8", timeout=1200)
    expect(done.returncode == 0, done.stderr[-2000:])
    bare = place.folder / "bare"
    bare.mkdir()
    app = Path(shutil.copy(place.folder / "dist" / "app", bare))
    started = time.perf_counter()
    shown = check_app(place, [app], cwd=bare, env={})
    seconds = (time.perf_counter() - started) / 3
    done = subprocess.run([app, "ortgpt", "doctor"], cwd=bare, env={}, capture_output=True, encoding="utf-8")
    expect(done.returncode == 0 and "self test             passed" in done.stdout, f"{done.stdout}{done.stderr}")
    expect("llguidance absent" not in done.stdout, done.stdout)
    facts = re.findall(r"^(?:ortgpt|packages|onnxruntime|self test) .*$", done.stdout, re.MULTILINE)
    shown += "\n\n$ ./app ortgpt doctor\n" + "\n".join(facts)
    return shown, f"{app.stat().st_size / 1e6:.0f} MB, {seconds:.1f} s from start to end of 12 tokens"


def check_app(place: Place, app: list[str | Path], **where: Any) -> str:
    """Compare what the app of examples/pyinstaller_app writes with what the runtime gives."""
    free, grammar = {"temperature": 0.8, "top_p": 0.95}, "[A-Z][a-z]+( [a-z]+)*"
    texts = place.expected(
        *((PROMPT, {"max_new_tokens": 12, "seed": 7} | options) for options in (free, {"grammar": grammar}))
    )
    expect(re.fullmatch(grammar, texts[1]) is not None, f"the runtime wrote {texts[1]!r}")
    shown = []
    for arguments, want in (
        ([PROMPT, "12"], (0, f"{texts[0]}\n", "")),
        ([PROMPT, "12", "--grammar", grammar], (0, f"{texts[1]}\n", "")),
        ([PROMPT, "0"], (1, "", f"{Path(app[-1]).name}: max_new_tokens = 0 (accepted: an integer of 1 or more)\n")),
    ):
        words: list[str | Path] = [*app, *arguments]
        done = subprocess.run(words, capture_output=True, encoding="utf-8", **where)
        found = (done.returncode, done.stdout, done.stderr)
        expect(found == want, f"{arguments}: {found}, not {want}")
        shown.append(f"$ ./app {shlex.join(arguments)}\n{done.stdout}{done.stderr}")
    return "\n".join(shown).rstrip("\n")


def image_call(command: list[str]) -> tuple[str, dict[str, Any]]:
    """Return prompt and options that the image's command names: ortgpt generate austen PROMPT --OPTION VALUE ..."""
    expect(command[:3] == ["ortgpt", "generate", "austen"], f"the image runs {command}")
    options = dict(zip(command[4::2], command[5::2], strict=True))
    return command[3], {name.removeprefix("--"): json.loads(value) for name, value in options.items()}


CHECKS: dict[str, Callable[[Place], tuple[str, str]]] = {
    "terminal": terminal,
    "fastapi_server": fastapi_server,
    "flask_gunicorn": flask_gunicorn,
    "gradio_page": gradio_page,
    "langchain_llm": partial(language_model, ("invoke", "chain", "chunks")),
    "llamaindex_llm": partial(language_model, ("complete", "stream", "responses")),
    "notebook": notebook,
    "docker": docker,
    "pyinstaller_app": pyinstaller_app,
}


# ---- a client that reads and leaves


Opened = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


@dataclass(frozen=True)
class Client:
    """Posts JSON to a server on this machine, and writes down what was said."""

    port: int
    transcript: list[str]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        connection, response = self.open(path, body)
        text = response.read().decode()
        self.close((connection, response))
        self.transcript.append(f"POST {path} {json.dumps(body)}\n{response.status}\n{text.rstrip()}")
        return response.status, {name.lower(): value for name, value in response.getheaders()}, text

    def begin(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def open(self, path: str, body: dict[str, Any]) -> Opened:
        connection = self.begin(path, body)
        return connection, connection.getresponse()

    def close(self, opened: Opened) -> None:
        opened[1].close()
        opened[0].close()

    def leave(self, place: Place, path: str, *, read: int = 0) -> int:
        """Ask for a long text, leave after `read` bytes (0: unread, at the third step); return the steps up to then."""
        before = place.steps()
        connection = self.begin(path, LONG)
        response = None
        if read:
            response = connection.getresponse()
            response.read(read)
        while place.steps() < before + 3:
            time.sleep(0.005)
        at = place.steps()
        if response is not None:
            response.close()
        connection.close()
        return at

    def expect_refusal(self, path: str, body: dict[str, Any], status: int, kind: str, words: str) -> None:
        found, headers, text = self.post(path, body)
        expect(found == status and headers["content-type"] == "application/json", f"{path} {body}: {found} {text}")
        error = json.loads(text)["error"]
        expect(error["type"] == kind and words in error["message"], f"{path} {body}: {text}")


# ---- environments


def is_running(pid: int) -> bool:
    """Tell whether a process is there and is more than the entry that an ended one leaves until its parent asks."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and not re.search(r"^State:\s+[ZX]", status.read_text(), re.MULTILINE)


def package_index() -> dict[str, str]:
    """Return what of this process's environment says where pip finds packages."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | {"HOME": os.environ["HOME"]}


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def build_wheel() -> Path:
    folder = BUILD / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"no wheel:\n{done.stdout}{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path, requirements: Path) -> Path:
    """Install the wheel with [cpu] and an example's requirements into an environment; return its Python."""
    if not folder.exists():
        venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    wanted: list[str | Path] = ["-r", requirements] if requirements.exists() else []
    for arguments in ([f"{wheel}[cpu]", *wanted], ["--force-reinstall", "--no-deps", wheel]):
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
        expect(done.returncode == 0, f"pip install:\n{done.stdout}{done.stderr}")
    return python


def copy_example(name: str, folder: Path, bundle: Path | None = None) -> Path:
    """Copy an example to `folder`, where it must work on its own; `bundle` takes the place of the package's own."""
    shutil.rmtree(folder, ignore_errors=True)
    copy(EXAMPLES / name, folder)
    if bundle is not None:
        (folder / "austen").symlink_to(bundle.resolve())
    return folder


def check(name: str, wheel: Path, bundle: Path | None, keep: bool) -> bool:
    """Run one example and say how it went."""
    started = time.monotonic()
    environment, record = ENVIRONMENTS / name, BUILD / f"{name}.txt"
    folder = copy_example(name, BUILD / "work" / name, bundle)
    try:
        python = make_environment(environment, wheel, folder / "requirements.txt")
        transcript, remark = CHECKS[name](Place(folder, python))
        passed = True
    except Exception as error:  # noqa: BLE001  # one example's failure must not hide the others
        transcript, remark, passed = f"FAILED\n{error!r}\n\n{error}", str(error), False
    record.write_text(transcript.rstrip() + "\n", encoding="utf-8")
    if not keep:
        shutil.rmtree(environment, ignore_errors=True)
        shutil.rmtree(folder / "root", ignore_errors=True)
    print(f"{name:<16}{'ok' if passed else 'FAILED':<8}{time.monotonic() - started:5.1f} s  {remark[:400]}", flush=True)
    return passed


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--keep", action="store_true", help="keep the environments, and use those that are there")
    parser.add_argument("--wheel", type=Path, help="install this wheel instead of a new one")
    parser.add_argument("--bundle", type=Path, help="use this bundle as `austen` instead of the package's own")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in CHECKS]:
        parser.error(f"no example {unknown[0]}")
    BUILD.mkdir(parents=True, exist_ok=True)
    wheel = (arguments.wheel or build_wheel()).resolve()
    results = [check(name, wheel, arguments.bundle, arguments.keep) for name in arguments.names or CHECKS]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()

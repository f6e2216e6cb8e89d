"""How a process ends while threads of it are in a call: with its own exit code, and without a word."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

_ENDS = {
    "generate": "generator.generate('It is', max_new_tokens=40)",
    "batch": "generator.generate_batch(['It is', 'a'] * 4, max_new_tokens=40)",
    "stream": "''.join(piece.text for piece in generator.stream('It is', max_new_tokens=40))",
    "beams": "generator.generate('It is', num_beams=4, max_new_tokens=20)",
    "lookup": "generator.generate('It is it is it is', prompt_lookup_num_tokens=4, max_new_tokens=40)",
    "grammar": "generator.generate('It is', grammar='[a-z ]{40}', max_new_tokens=20)",
    "compile": "generator.generate('It is', grammar=f'[a-z ]{{{time.time_ns() % 2000}}}', max_new_tokens=1)",
    "score": "generator.score('It is a truth universally acknowledged')",
    "choose": "generator.choose('It is', [' a', ' that'])",
    "encode": "generator.tokenizer.encode('It is a truth universally acknowledged' * 10_000)",
    "load": "ortgpt.load(sys.argv[1]).close()",
    "agenerate": "asyncio.run(gather([generator.agenerate('It is', max_new_tokens=40) for _ in range(3)]))",
    "astream": "asyncio.run(gather([read(generator.astream('It is', max_new_tokens=40)) for _ in range(3)]))",
}
_DAEMON = """if True:
    import asyncio, sys, threading, time
    import ortgpt
    generator = ortgpt.load(sys.argv[1], threads=2)
    async def gather(calls):
        await asyncio.gather(*calls)
    async def read(pieces):
        async for _ in pieces:
            pass
    started = threading.Event()
    def work():
        while True:
            {}
            started.set()
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    started.wait()
    {}
"""


@pytest.mark.parametrize("call", _ENDS)
def test_a_process_ends_while_its_threads_work(call: str, small_bundle: Path) -> None:
    """Python ends a daemon thread where it takes the GIL again; inside native code that would abort the process."""
    for end in ("time.sleep(0.01)", "sys.exit()"):
        done = subprocess.run(
            [sys.executable, "-c", _DAEMON.format(_ENDS[call], end), str(small_bundle)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")


def test_a_function_that_runs_at_the_exit_may_generate(small_bundle: Path) -> None:
    code = """if True:
        import atexit, sys, threading
        def late():
            print(generator.generate("It is", max_new_tokens=2).token_ids)
            stop.set()
            thread.join()
            print("joined")
        atexit.register(late)
        import ortgpt
        generator = ortgpt.load(sys.argv[1])
        stop = threading.Event()
        def work():
            while not stop.is_set():
                generator.generate("a", max_new_tokens=8)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        print(generator.generate("It is", max_new_tokens=2).token_ids)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_bundle)], capture_output=True, text=True, timeout=60, check=True
    )
    first, last, joined = done.stdout.splitlines()
    assert first == last
    assert joined == "joined"


def test_a_server_of_threads_ends_by_ctrl_c(small_bundle: Path) -> None:
    code = """if True:
        import http.server, sys, threading
        import ortgpt
        generator = ortgpt.load(sys.argv[1])
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                print("asked", flush=True)
                while True:
                    generator.generate("It is", max_new_tokens=40)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        print(server.server_port, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
    """
    server = subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}",
         str(small_bundle)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    with socket.create_connection(("127.0.0.1", int(server.stdout.readline()))) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert server.stdout.readline() == "asked\n"
        time.sleep(0.2)
        server.send_signal(signal.SIGINT)
        said, error = server.communicate(timeout=60)
    assert (server.returncode, said, error) == (0, "stopped\n", "")


# Calls, each ended by a KeyboardInterrupt at some moment. `armed` keeps a second one from coming early.
_INTERRUPTED = """if True:
    import _thread, signal, sys, threading, time
    import ortgpt
    armed, stopped = [False], threading.Event()
    def handler(number, frame):
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt
    def interrupt():
        while not stopped.is_set():
            time.sleep({interval_s})
            _thread.interrupt_main()
    signal.signal(signal.SIGINT, handler)
    generator = ortgpt.load(sys.argv[1], threads=1)
    generator.prefix_cache(size_bytes=2**20)
    generator.generate("a", max_new_tokens=1, grammar="[a-z ]+")
    thread = threading.Thread(target=interrupt)
    thread.start()
    for _ in range({count}):
        try:
            armed[0] = True
            while True:
                {call}
        except KeyboardInterrupt:
            pass
    armed[0] = False
    stopped.set()
    thread.join()
    print(len(generator.generate("It is", max_new_tokens=3, grammar="[a-z ]+").token_ids))
"""


@pytest.mark.parametrize(
    ("call", "interval_s", "count"),
    [
        ("generator.tokenizer.encode('It is a truth universally acknowledged')", 0.0003, 2000),
        ("generator.generate('a', max_new_tokens=1, grammar='[a-z ]+')", 0.002, 1000),
    ],
)
def test_ctrl_c_leaves_no_lock_held_and_nothing_to_wait_for(
    call: str, interval_s: float, count: int, small_bundle: Path
) -> None:
    code = _INTERRUPTED.format(call=call, interval_s=interval_s, count=count)
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_bundle)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers of the kind")
def test_an_exception_of_a_signals_handler_stays_what_it_is(small_bundle: Path) -> None:
    """Celery raises its time limit this way."""
    code = """if True:
        import signal, sys
        import ortgpt
        class Limit(Exception): pass
        def handler(number, frame):
            raise Limit
        signal.signal(signal.SIGALRM, handler)
        generator, limits = ortgpt.load(sys.argv[1], threads=1), 0
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003)
                while True:
                    generator.score("It is a truth universally acknowledged")
            except Limit:
                limits += 1
        print(limits)
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(small_bundle)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "300\n"), done.stderr

"""Generators in other processes and threads, without sockets, and on the machine's terms; and what doctor says."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import operator
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ortgpt
from ortgpt import ClosedError
from ortgpt.cli.main import main
from ortgpt.decode.scoring import continuation_logprobs
from ortgpt.forks import FORKED
from ortgpt.sampling.grammar import Grammars
from ortgpt.tools.doctor import diagnose

# A function that a spawned process finds by its name.
generate = operator.methodcaller("generate", "It is a truth", max_new_tokens=8)


def forked(function: Callable[[], object]) -> str:
    """Return what a forked child says that calls `function`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            try:
                said = f"returned {function()!r}"
            except Exception as error:  # noqa: BLE001  # whatever it is, the parent is told
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_is_told_to_load_the_bundle_itself(small: ortgpt.Generator, small_bundle: Path) -> None:
    """ONNX Runtime's threads do not live on in a child, where a run would wait for them for ever."""
    pieces = small.stream("a", max_new_tokens=8)
    next(pieces)
    conversation = small.conversation("a")
    engine = small.engine
    uses: tuple[Callable[[], object], ...] = (
        lambda: small.generate("a", max_new_tokens=1),
        lambda: next(pieces),
        lambda: conversation.generate(max_new_tokens=1),
        lambda: small.score("a man"),
        lambda: small.embed(["a man"]),
        lambda: continuation_logprobs(engine, [1], [[2]]),
    )
    for use in uses:
        assert forked(use) == f"ClosedError: {FORKED}"
    assert forked(lambda: generate(ortgpt.load(small_bundle)).token_ids) == f"returned {generate(small).token_ids}"
    assert forked(lambda: pickle.loads(pickle.dumps(small)).bundle.path) == f"returned {small_bundle.resolve()!r}"
    assert "".join(piece.text for piece in pieces)
    assert small.generate("a", max_new_tokens=1).token_ids


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_lock_that_another_thread_holds_at_the_fork_does_not_hang_the_child(small_bundle: Path) -> None:
    with ortgpt.load(small_bundle) as generator:
        cache = generator.prefix_cache(size_bytes=2**20)
        begun = generator.stream("It is a truth", max_new_tokens=4)
        schema = generator.stream("It is", max_new_tokens=4, grammar="[a-z ]+")
        uses: tuple[Callable[[], object], ...] = (
            lambda: generator.generate("It is", max_new_tokens=1),
            lambda: generator.generate("It is", max_new_tokens=1, grammar="[a-z]+"),
            lambda: generator.conversation("It is"),
            lambda: asyncio.run(generator.agenerate("It is", max_new_tokens=1)),
            lambda: asyncio.run(anext(generator.astream("It is", max_new_tokens=1))),
            lambda: next(begun),
            lambda: next(schema),
            cache.clear,
        )
        asyncio.run(generator.agenerate("It is", max_new_tokens=1))  # its threads do not exist in a child
        with ThreadPoolExecutor(1) as other, cache._lock.here(), generator.grammars._lock.here():
            for use in uses:
                assert other.submit(forked, use).result(timeout=60) == f"ClosedError: {FORKED}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_loads_the_bundle_again_where_it_is_asked_to(small_bundle: Path) -> None:
    def everything(generator: ortgpt.Generator) -> list[object]:
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(lambda _: generate(generator).token_ids, range(4)))
        return [
            *rows,
            asyncio.run(generator.agenerate("It is", max_new_tokens=4)).token_ids,
            generator.generate("It is", max_new_tokens=4, grammar="[a-z ]+").text,
            round(generator.score("a single man").nll, 3),
            generator.prefixes is not None,
        ]

    def grammars_in_threads(generator: ortgpt.Generator) -> list[str]:
        real = Grammars.__init__

        def slow(self: Grammars, *values: Any) -> None:
            time.sleep(0.2)  # other threads look at the generator meanwhile
            real(self, *values)

        Grammars.__init__ = slow  # type: ignore[assignment, method-assign]  # in the child
        with ThreadPoolExecutor(4) as pool:
            options: dict[str, Any] = {"max_new_tokens": 4, "grammar": "[a-z ]+"}
            return list(pool.map(lambda _: generator.generate("It is", **options).text, range(4)))

    with ortgpt.load(small_bundle, reload_after_fork=True) as generator:
        cache = generator.prefix_cache(size_bytes=2**20)
        want = everything(generator)
        turn = generator.conversation("It is")
        turn.generate(" a truth", max_new_tokens=4)
        with cache._lock.here(), generator.grammars._lock.here():
            assert forked(lambda: everything(generator)) == f"returned {want!r}"
            assert forked(lambda: forked(lambda: everything(generator))) == f"returned {f'returned {want!r}'!r}"
        assert forked(lambda: grammars_in_threads(generator)) == f"returned {[want[5]] * 4!r}"
        both = forked(lambda: (turn.generate(" and", max_new_tokens=4).token_ids, turn.text))
        assert both == f"returned {(turn.generate(' and', max_new_tokens=4).token_ids, turn.text)!r}"
        with pickle.loads(pickle.dumps(generator)) as again:
            assert forked(lambda: generate(again).token_ids) == f"returned {want[0]!r}"
        assert everything(generator) == want
    assert forked(lambda: generate(generator)) == "ClosedError: this generator is closed; load the bundle again"
    with pytest.raises(ortgpt.OptionError, match="reload_after_fork = 'yes'"):
        ortgpt.load(small_bundle, reload_after_fork="yes")  # type: ignore[arg-type]  # on purpose


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("first", ["load", "grammar", "generate"])
def test_a_fork_waits_for_imports_and_native_calls_of_other_threads(first: str, small_bundle: Path) -> None:
    """What another thread has locked at the fork, for an import or in native code, stays locked in the child."""
    code = """if True:
        import os, sys, threading, time
        import ortgpt
        path, first, delay_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
        if first != "load":
            generator = ortgpt.load(path, reload_after_fork=True)
        def work():
            if first == "load":
                ortgpt.load(path)
            elif first == "grammar":
                generator.generate("It is", max_new_tokens=2, grammar="[a-z ]+")
            else:
                while True:
                    generator.generate("It is", max_new_tokens=20)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(delay_s)
        child = os.fork()
        if child == 0:
            if first == "load":
                generator = ortgpt.load(path)
            generator.generate("It is", max_new_tokens=2, grammar="[a-z ]+")
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    for delay_s in (0.001, 0.005, 0.01, 0.02, 0.04, 0.08):
        assert run(code, str(small_bundle), first, str(delay_s), timeout=60) == "7\n"


@pytest.mark.parametrize(
    "end", ["sys.exit(7)", "generator.close(); sys.exit(7)", "del generator; gc.collect(); os._exit(7)"]
)
def test_a_fork_ends(end: str, small_bundle: Path) -> None:
    """What a child frees must not wait for threads that it has not; threads=2, since a pool of one has none."""
    code = f"""if True:
        import gc, os, sys
        import ortgpt
        generator = ortgpt.load(sys.argv[1], threads=2)
        generator.generate("a", max_new_tokens=2)
        child = os.fork()
        if child == 0:
            {end}
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(code, str(small_bundle), timeout=60) == "7\n"


def test_a_pickled_generator_loads_the_bundle_anew(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(small_bundle.parent)
    with ortgpt.load(small_bundle.name) as small, ortgpt.load(small_bundle, threads=3) as three:
        monkeypatch.chdir(tmp_path)
        want = generate(small).token_ids
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(generate, small).result(timeout=120).token_ids == want
        monkeypatch.setattr("ortgpt.ort.session.allowed_cpus", lambda: 1)  # as on a smaller machine
        for generator, threads in ((small, 1), (three, 3)):
            with pickle.loads(pickle.dumps(generator)) as again:
                assert again is not generator
                assert again.bundle.path == small_bundle
                assert again.engine.session.threads == threads
                assert generate(again).token_ids == want
    with pytest.raises(ClosedError):
        pickle.dumps(small)


def run(code: str, *args: str, **options: Any) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


# A filter of system calls that ends the process with SIGSYS where any of its threads, Python's or not, opens a socket:
# load the call's number; where it is not socket's, allow; else kill the process.
_NO_SOCKETS = """if True:
    import ctypes, platform, struct
    number = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    steps = ((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, program, 0, 0) == 0  # seccomp, by a filter
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of system calls is Linux's")
def test_the_runtime_opens_no_socket_and_leaves_nothing_in_the_home_folder(small_bundle: Path, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry, where it is on, writes an id at once and opens a socket after 8 seconds."""
    code = f"""{_NO_SOCKETS}
    import sys, time
    if sys.argv[2:]:
        import socket
        socket.socket()
    import ortgpt
    with ortgpt.load(sys.argv[1]) as generator:
        print(generator.generate("It is", max_new_tokens=4, grammar="[a-z ]+").token_ids)
        print(generator.score("a man").tokens, len(generator.choose("a", ["b", "c"])))
        time.sleep(12)
    """
    # CI and the like turn telemetry off by themselves.
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    run(code, str(small_bundle), env=environment, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match=f"-{signal.SIGSYS.value} == 0"):
        run(code, str(small_bundle), "socket", env=environment)


@pytest.mark.parametrize(
    ("value", "after", "calls"),
    [(None, "1", 1), ("1", "1", 1), (" Yes", " Yes", 1), ("0", "0", 0), ("false", "false", 0), ("", "", 0)],
)
def test_telemetry_is_off_unless_the_user_has_set_its_variable(
    value: str | None, after: str, calls: int, small_bundle: Path
) -> None:
    """On Windows, a call turns it off, which must follow the variable and come once: a caller may turn it on again."""
    code = """if True:
        import os, sys, ortgpt
        print(repr(os.environ["ORT_DISABLE_TELEMETRY"]))
        import onnxruntime
        onnxruntime.disable_telemetry_events = lambda: print("disabled")
        for _ in range(2):
            ortgpt.load(sys.argv[1]).close()
        print(repr(os.environ["ORT_DISABLE_TELEMETRY"]))
    """
    environment = {name: each for name, each in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    given = {} if value is None else {"ORT_DISABLE_TELEMETRY": value}
    written = run(code, str(small_bundle), env=environment | given)
    assert written.splitlines() == [repr(after), *["disabled"] * calls, repr(after)]


@pytest.fixture
def one_cpu() -> Iterator[Path]:
    """The file of a control group with the quota of one CPU that takes processes; skips where none may be made."""
    if sys.platform != "linux":
        pytest.skip("control groups are Linux's")
    groups = [Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")]  # version 1, version 2
    group = next(group for group in groups if group.is_dir()) / f"ortgpt-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limits = {"cpu.cfs_quota_us": "100000", "cpu.max": "100000 100000"}
        name = next((name for name in limits if (group / name).exists()), None)
        if name is None:
            pytest.skip("control groups have no quota of the CPU here")
        (group / name).write_text(limits[name])
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


_ONE_THREAD = """if True:
    import os, sys, time
    {}
    import ortgpt
    def tasks():
        return len(os.listdir("/proc/self/task"))
    with ortgpt.load(sys.argv[1]) as generator:
        generator.generate("a", max_new_tokens=4)
        deadline = time.monotonic() + 30
        while tasks() > 1 and time.monotonic() < deadline:  # a thread that was joined leaves /proc a little later
            time.sleep(0.01)
        print(generator.engine.session.threads, tasks())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="an affinity mask is Linux's")
def test_the_pool_is_no_larger_than_the_cpus_allowed(small_bundle: Path) -> None:
    code = _ONE_THREAD.format("os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])")
    assert run(code, str(small_bundle)).split() == ["1", "1"]


def test_the_pool_is_no_larger_than_the_quota(small_bundle: Path, one_cpu: Path) -> None:
    code = _ONE_THREAD.format(
        "open(sys.argv[2], 'w').write(str(os.getpid())); os.environ['OPENBLAS_NUM_THREADS'] = '1'"
    )
    assert run(code, str(small_bundle), str(one_cpu)).split() == ["1", "1"]


def test_the_self_test_passes_and_notices_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnose()
    assert found.faults == []
    assert found.self_test_s is not None
    assert found.onnxruntime
    assert "CPUExecutionProvider" in found.providers
    values = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert values["cpus_allowed"] >= 1
    assert values["faults"] == []
    assert "passed in" in CliRunner().invoke(main, ["doctor"]).stdout
    monkeypatch.setattr("ortgpt.tools.doctor.SELF_TEST_IDS", (1, 2, 3))
    failed = CliRunner().invoke(main, ["doctor"])
    assert failed.exit_code == 1
    assert "FAULT: the self-test gave the tokens" in failed.stdout
    monkeypatch.setattr("ortgpt.ort.package.installed_wheels", lambda: ["onnxruntime", "onnxruntime-gpu"])
    both = CliRunner().invoke(main, ["doctor"])
    assert both.exit_code == 1
    assert "FAULT: onnxruntime and onnxruntime-gpu are both installed" in both.stdout

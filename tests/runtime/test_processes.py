"""Generators in other processes and threads, without sockets, and on the machine's terms; and what doctor says."""

from __future__ import annotations

import json
import multiprocessing
import operator
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ortgpt
from ortgpt import ClosedError
from ortgpt.cli import main
from ortgpt.doctor import SELF_TEST, diagnose

# A function that a spawned process finds by its name.
generate = operator.methodcaller("generate", "It is a truth", max_new_tokens=8)


def test_a_fork_is_told_to_load_the_bundle_itself(small: ortgpt.Generator) -> None:
    """ONNX Runtime's threads do not live on in a child, where a run would wait for them for ever."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            small.generate("a", max_new_tokens=1)
            said = "nothing"
        except ClosedError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert "loaded in another process" in stream.read()
    os.waitpid(child, 0)
    assert small.generate("a", max_new_tokens=1).token_ids


def test_a_pickled_generator_loads_the_bundle_anew(small: ortgpt.Generator, small_bundle: Path) -> None:
    want = generate(small).token_ids
    with pickle.loads(pickle.dumps(small)) as again:
        assert again is not small
        assert again.bundle.path == small_bundle.resolve()
        assert again.engine.session.threads == small.engine.session.threads
        assert generate(again).token_ids == want
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(generate, small).result(timeout=120).token_ids == want
    with ortgpt.load(small_bundle) as closed:
        pass
    with pytest.raises(ClosedError):
        pickle.dumps(closed)


def run(code: str, *args: str, **options: Any) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_the_runtime_opens_no_socket(small_bundle: Path) -> None:
    code = """if True:
        import sys
        def refuse(event, args):
            if event.startswith("socket."):
                raise RuntimeError(event)
        sys.addaudithook(refuse)
        import ortgpt
        with ortgpt.load(sys.argv[1]) as generator:
            print(generator.generate("It is", max_new_tokens=4, grammar="[a-z ]+").token_ids)
            print(generator.score("a man").tokens, len(generator.choose("a", ["b", "c"])))
        try:
            import socket
            socket.socket()
        except RuntimeError as error:
            print("refused", error)
    """
    assert "refused socket." in run(code, str(small_bundle))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="an affinity mask is Linux's")
def test_the_pool_is_no_larger_than_the_cpus_allowed(small_bundle: Path) -> None:
    code = """if True:
        import os, sys
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        import ortgpt
        with ortgpt.load(sys.argv[1]) as generator:
            generator.generate("a", max_new_tokens=4)
            options = generator.engine.session.handle.get_session_options()
            print(generator.engine.session.threads, options.intra_op_num_threads, options.inter_op_num_threads)
    """
    assert run(code, str(small_bundle)).split() == ["1", "1", "1"]


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
    monkeypatch.setattr("ortgpt.doctor.SELF_TEST_IDS", (1, 2, 3))
    failed = CliRunner().invoke(main, ["doctor"])
    assert failed.exit_code == 1
    assert "FAULT: the self-test gave the tokens" in failed.stdout
    monkeypatch.setattr("ortgpt.session.installed_wheels", lambda: ["onnxruntime", "onnxruntime-gpu"])
    both = CliRunner().invoke(main, ["doctor"])
    assert both.exit_code == 1
    assert "FAULT: onnxruntime and onnxruntime-gpu are both installed" in both.stdout


def test_the_self_tests_bundle_is_a_bundle_of_today(small_checkpoint: Path) -> None:
    """Made by `python tests/make_selftest.py`; a change of the graphs makes it anew."""
    info = json.loads(CliRunner().invoke(main, ["info", str(SELF_TEST), "--json"]).stdout)
    assert (info["n_layer"], info["vocab_size"]) == (1, 257)
    assert info["size_bytes"] < 200_000

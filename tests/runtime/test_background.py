"""A job beside its caller ends before its block does, also where Ctrl-C comes while its thread starts."""

from __future__ import annotations

import threading

import pytest

from ortgpt.background import Background


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_job_has_ended_where_ctrl_c_comes_while_its_thread_starts(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    stop = threading.Event()
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        if has_begun:
            start(thread)
        raise KeyboardInterrupt

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with (
        pytest.raises(KeyboardInterrupt),
        Background(lambda: stop.wait(60), stop=stop.set, daemon=True),
    ):
        pytest.fail("the block began")
    assert stop.is_set()
    assert threading.active_count() == before

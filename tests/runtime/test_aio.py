"""Calls side by side, in asyncio and in threads, and how each is ended before its time."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ortgpt
from ortgpt import OptionError
from ortgpt.aio import Turns

PROMPTS = ["It is a truth", "", "a single man", "universally acknowledged, that", "Café — 日本", "wife"] * 2


def test_many_streams_at_once_equal_serial_ones(small: ortgpt.Generator) -> None:
    options: list[dict[str, Any]] = [{}, {"seed": 4}, {"prompt_lookup_num_tokens": 4}, {"grammar": "[a-z ]{9}"}]
    cases = [(prompt, options[place % 4]) for place, prompt in enumerate(PROMPTS)]
    want = [small.generate(prompt, max_new_tokens=25, **each) for prompt, each in cases]

    async def read(prompt: str, each: dict[str, Any]) -> tuple[str, str | None]:
        text, reason = "", None
        async for piece in small.astream(prompt, max_new_tokens=25, **each):
            text, reason = text + piece.text, piece.finish_reason
        return text, reason

    async def read_all() -> list[tuple[str, str | None]]:
        return await asyncio.gather(*(read(*case) for case in cases))

    async def generate_all() -> list[ortgpt.Completion]:
        return await asyncio.gather(*(small.agenerate(prompt, max_new_tokens=25, **each) for prompt, each in cases))

    assert asyncio.run(read_all()) == [(each.text, each.finish_reason) for each in want]
    assert [each.token_ids for each in asyncio.run(generate_all())] == [each.token_ids for each in want]


def test_threads_share_one_generator(small: ortgpt.Generator) -> None:
    def call(place: int) -> Any:
        kinds: list[Any] = [
            lambda: small.generate(PROMPTS[place % 6], max_new_tokens=20, seed=place).token_ids,
            lambda: [each.token_ids for each in small.generate_batch(PROMPTS[:3], max_new_tokens=20)],
            lambda: small.score("a single man in possession").nll,
            lambda: [each.index for each in small.choose("It is", [" a", " that", " truth"])],
            lambda: small.generate("It is", max_new_tokens=9, grammar=["yes", "no"]).text,
            lambda: small.generate_batch(["a man"], num_beams=3, max_new_tokens=9)[0].token_ids,
        ]
        return kinds[place % len(kinds)]()

    want = [call(place) for place in range(48)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(48))) == want


class Watched:
    """A logits processor that counts the steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.started = threading.Event()

    def __call__(self, ids: Any, logits: Any) -> Any:
        self.steps += 1
        self.started.set()
        time.sleep(0.005)
        return logits


def test_leaving_or_cancelling_an_async_stream_ends_it(small: ortgpt.Generator) -> None:
    async def leave() -> int:
        watched = Watched()
        stream = small.astream("a", max_new_tokens=60, eos_token_id=[], logits_processor=watched)
        async for _ in stream:
            break
        await stream.aclose()
        steps = watched.steps
        await asyncio.sleep(0.05)
        assert watched.steps == steps
        return steps

    async def cancel(kind: str) -> int:
        watched = Watched()

        async def work() -> None:
            options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": [], "logits_processor": watched}
            if kind == "stream":
                async for _ in small.astream("a", **options):
                    pass
            else:
                await small.agenerate("a", **options)

        task = asyncio.create_task(work())
        while not watched.started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps = watched.steps
        await asyncio.sleep(0.05)
        assert watched.steps <= steps + 1  # the one in hand
        return watched.steps

    assert asyncio.run(leave()) < 10
    assert asyncio.run(cancel("stream")) < 30
    assert asyncio.run(cancel("generate")) < 30
    assert len(small.generate("a", max_new_tokens=5).token_ids) == 5


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ortgpt")}


@pytest.fixture
def two_threads(small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of many CPUs, each of a few calls would have a thread."""
    monkeypatch.setattr(small, "_turns", Turns(2))


@pytest.mark.usefixtures("two_threads")
def test_asynchronous_calls_and_the_applications_do_not_wait_for_each_other(small: ortgpt.Generator) -> None:
    """asyncio's default executor is the application's, and the one that name lookups need."""
    gate, want = threading.Event(), small.generate("a", max_new_tokens=2)

    def wait(ids: Any, logits: Any) -> Any:
        assert gate.wait(60)
        return logits

    async def application_blocked() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        blocked = [asyncio.create_task(asyncio.to_thread(gate.wait, 60)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert (await small.agenerate("a", max_new_tokens=2)).token_ids == want.token_ids
        assert "".join([piece.text async for piece in small.astream("a", max_new_tokens=2)]) == want.text
        gate.set()
        await asyncio.gather(*blocked)

    async def calls_blocked() -> list[ortgpt.Completion]:
        calls = [asyncio.create_task(small.agenerate("a", max_new_tokens=2, logits_processor=wait)) for _ in range(40)]
        streams = [small.astream("a", max_new_tokens=2, logits_processor=wait) for _ in range(40)]
        firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0.05)
        loop = asyncio.get_running_loop()
        assert await asyncio.wait_for(loop.getaddrinfo("127.0.0.1", 80), 30)
        assert 1 <= len(own_threads() - before) <= 2
        gate.set()
        await asyncio.gather(*firsts)
        for stream in streams:
            await stream.aclose()
        return await asyncio.gather(*calls)

    before = own_threads()
    asyncio.run(application_blocked())
    gate.clear()
    assert [each.token_ids for each in asyncio.run(calls_blocked())] == [want.token_ids] * 40


@pytest.mark.usefixtures("two_threads")
def test_asynchronous_calls_take_turns(small: ortgpt.Generator) -> None:
    async def work() -> tuple[str, int]:
        options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": [], "logits_processor": Watched()}
        long = [asyncio.create_task(small.agenerate("a", **options)) for _ in range(20)]
        await asyncio.sleep(0.02)
        text = "".join([piece.text async for piece in small.astream("a", max_new_tokens=2)])
        text += (await small.agenerate("a", max_new_tokens=2)).text
        ended = sum(task.done() for task in long)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        return text, ended

    assert asyncio.run(work()) == (small.generate("a", max_new_tokens=2).text * 2, 0)


def test_a_stream_refuses_at_the_call_what_it_cannot_serve(small: ortgpt.Generator) -> None:
    async def calls() -> None:
        for error, prompt, options in (
            (ortgpt.PromptError, {"no": "prompt"}, {}),
            (ortgpt.PromptError, [1, 10**6], {}),
            (ortgpt.ContextLengthError, [1] * 60, {"max_new_tokens": 60}),
            (OptionError, "a", {"top_p": 2}),
            (OptionError, "a", {"grammar": "["}),
            (ortgpt.UnknownOptionError, "a", {"max_tokens": 2}),
        ):
            with pytest.raises(error):
                small.astream(prompt, **options)  # type: ignore[arg-type]  # some on purpose

    asyncio.run(calls())


def test_a_callers_function_runs_in_the_callers_context(small: ortgpt.Generator) -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
    found = []

    def note(ids: Any, logits: Any) -> Any:
        found.append(request.get())
        return logits

    async def call(name: str) -> None:
        request.set(name)
        await small.agenerate("a", max_new_tokens=3, eos_token_id=[], logits_processor=note)
        async for _ in small.astream("a", max_new_tokens=2, eos_token_id=[], logits_processor=note):
            pass

    async def calls() -> None:
        await asyncio.gather(call("one"), call("two"))

    asyncio.run(calls())
    assert sorted(found) == ["one"] * 5 + ["two"] * 5


def test_a_time_limit_ends_every_row(small: ortgpt.Generator) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": []}
    for timeout_s in (1e-9, 0.03):
        watched = Watched()
        found = small.generate_batch(["a", "b"], timeout_s=timeout_s, logits_processor=watched, **options)
        assert [each.finish_reason for each in found] == ["timeout"] * 2
        assert len(found[0].token_ids) < 12
        assert small.generate("a", **options).text.startswith(found[0].text)
    pieces = list(small.stream("a", timeout_s=0.02, logits_processor=Watched(), **options))
    assert pieces[-1].finish_reason == "timeout"
    beams = small.generate("a", num_beams=3, timeout_s=0.02, logits_processor=Watched(), **options)
    assert beams.finish_reason == "timeout"
    assert 1 <= len(beams.token_ids) < 12
    assert small.generate("a", timeout_s=100, max_new_tokens=3).finish_reason == "length"
    with pytest.raises(OptionError, match="timeout_s = 0"):
        small.generate("a", timeout_s=0)


def test_the_time_of_a_call_includes_its_encoding(small: ortgpt.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = small.tokenizer.encode

    def slow(text: str) -> list[int]:
        time.sleep(3.1)
        return encode(text)

    monkeypatch.setattr(small.tokenizer, "encode", slow)
    done = small.generate("a", timeout_s=3, max_new_tokens=3)
    assert (done.finish_reason, done.token_ids) == ("timeout", [])
    assert list(small.stream("a", timeout_s=3, max_new_tokens=1))[-1].finish_reason == "length"


def test_the_time_of_a_stream_runs_from_its_first_piece(small: ortgpt.Generator) -> None:
    options: Any = {"max_new_tokens": 3, "timeout_s": 2, "eos_token_id": []}
    conversation = small.conversation("a")
    streams = [small.stream("a", **options), conversation.stream(" man", **options)]

    async def late() -> str | None:
        pieces = small.astream("a", **options)
        await asyncio.sleep(2.1)
        return [piece async for piece in pieces][-1].finish_reason

    assert asyncio.run(late()) == "length"
    for stream in streams:
        assert list(stream)[-1].finish_reason == "length"


def test_an_event_cancels_from_another_thread(small: ortgpt.Generator) -> None:
    event, watched = threading.Event(), Watched()

    def set_soon() -> None:
        watched.started.wait()
        event.set()

    thread = threading.Thread(target=set_soon)
    thread.start()
    done = small.generate("a", max_new_tokens=60, eos_token_id=[], cancel=event, logits_processor=watched)
    thread.join()
    assert done.finish_reason == "cancelled"
    assert 1 <= len(done.token_ids) < 12
    with pytest.raises(OptionError, match=r"a threading\.Event"):
        small.generate("a", cancel=True)
    with pytest.raises(OptionError, match=r"a threading\.Event"):
        asyncio.run(small.agenerate("a", cancel=True))
    # What is cancelled beforehand is not begun.
    ways: list[dict[str, Any]] = [{}, {"prompt_lookup_num_tokens": 4}, {"logprobs": 1, "echo": True}, {"num_beams": 2}]
    for way in ways:
        found = small.generate_batch(["a", "b"], cancel=event, **way)
        assert [(each.finish_reason, each.token_ids) for each in found] == [("cancelled", [])] * 2


def test_an_error_in_a_callers_function_reaches_the_caller(small: ortgpt.Generator) -> None:
    def fail(ids: Any, logits: Any) -> Any:
        if len(ids) > 4:
            raise KeyError("mine")
        return logits

    async def stream() -> None:
        async for _ in small.astream([1, 2], max_new_tokens=9, logits_processor=fail):
            pass

    with pytest.raises(KeyError, match="mine"):
        small.generate([1, 2], max_new_tokens=9, logits_processor=fail)
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(stream())
    assert len(small.generate([1, 2], max_new_tokens=9, eos_token_id=[]).token_ids) == 9


@pytest.mark.parametrize("kind", ["beams", "held text"])
def test_a_call_that_shows_nothing_for_long_takes_turns_and_can_be_cancelled(
    kind: str, small: ortgpt.Generator
) -> None:
    """Beams give their text at the end, and text that may begin a stop string is held."""
    text = small.generate("a", max_new_tokens=60, eos_token_id=[]).text
    watched = Watched()
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": [], "logits_processor": watched}

    async def work() -> None:
        if kind == "beams":
            await small.agenerate("a", num_beams=3, **options)
        else:
            async for _ in small.astream("a", stop=text + " never", **options):
                pass

    async def cancel() -> int:
        tasks = [asyncio.create_task(work()) for _ in range(6)]
        while not watched.started.is_set():
            await asyncio.sleep(0.001)
        assert (await small.agenerate("a", max_new_tokens=2)).finish_reason == "length"
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.1)
        steps = watched.steps
        await asyncio.sleep(0.3)
        assert watched.steps <= steps + 4 * 3  # those in hand
        return watched.steps

    assert asyncio.run(cancel()) < 6 * 60

"""Stop strings over any token boundary, in generate and stream alike, against a search of the text letter by letter."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import ortgpt
from ortgpt.continuation import text_until
from ortgpt.text.detokenizer import StopMatcher


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that is complete first, the longer of two, letter by letter."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=1000, deadline=None)
@given(
    pieces=st.lists(st.text("abé\n日👩", max_size=4), max_size=12),
    stops=st.lists(st.text("abé\n日👩", min_size=1, max_size=4), max_size=4),
)
def test_pieces_cut_anywhere_give_what_a_search_gives(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, whole = "", "".join(pieces)
    for place, piece in enumerate(pieces):
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            assert (shown, stop) == cut(whole, stops)
            return
        # What is held back is no more than what may begin a stop string.
        so_far = "".join(pieces[: place + 1])
        assert so_far.startswith(shown)
        held = so_far[len(shown) :]
        assert held == "" or any(each.startswith(held) and each != held for each in stops)
    assert (shown + matcher.finish(), None) == cut(whole, stops)


def test_what_may_begin_a_stop_is_held_back_and_no_more() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert [matcher.push(piece)[0] for piece in ("a E", "N", "x\n", "b", "EN", "D!")] == [
        "a ",
        "",
        "ENx",
        "\nb",
        "",
        "",
    ]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_generate_and_stream_stop_at_the_same_place(small: ortgpt.Generator, data: Any) -> None:
    seed = data.draw(st.integers(0, 20))
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": [], "temperature": 1.3, "seed": seed}
    free = small.generate("a man", **options)
    text = free.text
    starts = data.draw(st.lists(st.integers(0, max(0, len(text) - 1)), min_size=1, max_size=3))
    lengths = [data.draw(st.integers(1, 6)) for _ in starts]
    stops = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)] + ["never\x00"]
    want, stop = cut(text, stops)
    done = small.generate("a man", stop=stops, **options)
    assert (done.text, done.stop_reason) == (want, stop)
    assert done.finish_reason == ("length" if stop is None else "stop")
    pieces = list(small.stream("a man", stop=stops, **options))
    assert "".join(piece.text for piece in pieces) == want
    assert text_until(small.tokenizer, free.token_ids, stops) == (want, stop)
    # No token is computed behind the one that completes the stop string.
    assert done.token_ids == free.token_ids[: len(done.token_ids)]
    if stop is not None:
        stream = small.tokenizer.stream()
        assert stop not in "".join(map(stream.push, done.token_ids[:-1]))

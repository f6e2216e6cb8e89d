"""Warnings of other packages are kept from stderr by filters that belong to the whole process."""

from __future__ import annotations

import threading
import warnings

from ortgpt_models.quiet import quiet_warnings


def test_blocks_that_overlap_leave_the_filters_as_they_were() -> None:
    before = list(warnings.filters)
    entered, first_left = threading.Barrier(2), threading.Event()

    def first() -> None:
        with quiet_warnings():
            entered.wait(60)
        first_left.set()

    def second() -> None:
        with quiet_warnings("axis"):
            entered.wait(60)
            first_left.wait(60)
            warnings.warn("axis names", UserWarning, stacklevel=1)

    threads = [threading.Thread(target=each) for each in (first, second)]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert warnings.filters == inside
        warnings.warn("heard", UserWarning, stacklevel=1)
    assert [str(each.message) for each in heard] == ["heard"]
    assert warnings.filters == before


def test_only_what_is_named_is_ignored() -> None:
    with warnings.catch_warnings(record=True) as heard, quiet_warnings(".*axis name", UserWarning):
        warnings.warn("an axis name", UserWarning, stacklevel=1)
        warnings.warn("an axis name", FutureWarning, stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    assert [(str(each.message), each.category) for each in heard] == [
        ("an axis name", FutureWarning),
        ("another", UserWarning),
    ]

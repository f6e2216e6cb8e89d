"""Keep the warnings of other packages from stderr. Knows none of them."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

_lock = threading.Lock()
_caught = contextlib.ExitStack()  # holds the filters as they were while _quiet_blocks is above 0
_quiet_blocks = 0


@contextlib.contextmanager
def quiet_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """Ignore warnings whose text begins with the regular expression `message`, in the whole process.

    Python keeps one list of filters for all threads. If blocks of several threads overlapped and each restored what it
    found, an earlier one's filters would stay for good. So the last block that ends restores what the first one found.
    """
    global _quiet_blocks
    with _lock:
        if _quiet_blocks == 0:
            _caught.enter_context(warnings.catch_warnings())
        _quiet_blocks += 1
        warnings.filterwarnings("ignore", message=message, category=category)
    try:
        yield
    finally:
        with _lock:
            _quiet_blocks -= 1
            if _quiet_blocks == 0:
                _caught.close()

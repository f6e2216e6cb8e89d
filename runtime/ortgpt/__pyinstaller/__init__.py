"""Tell PyInstaller where the hook is that packs this runtime into an app. Imports nothing."""

from __future__ import annotations

import os


def get_hook_dirs() -> list[str]:
    """Return the folder of the hook, for the entry point `pyinstaller40`."""
    return [os.path.dirname(__file__)]

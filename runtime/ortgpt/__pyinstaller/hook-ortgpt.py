"""PyInstaller's hook: what an app with the runtime needs besides modules. Runs while the app is built.

The exporter stays out unless the app imports it: it would bring torch. PyInstaller finds modules that functions import.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError

from PyInstaller.utils.hooks import collect_data_files, copy_metadata

# The built-in bundles, `austen` and the one of doctor's self-test; and the forms of tasks.
datas = collect_data_files("ortgpt", subdir="builtin")
datas += collect_data_files("ortgpt", subdir="tasks/forms")
# llguidance reads its own version; doctor reads those of all, and the command line the list of its commands.
for name in ("ortgpt", "numpy", "tiktoken", "click", "llguidance", "tokenizers", "onnxruntime", "onnxruntime-gpu"):
    with contextlib.suppress(PackageNotFoundError):  # of the two wheels, one is there; two others are extras
        datas += copy_metadata(name)

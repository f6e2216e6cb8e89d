"""Run an `ortgpt` command as on Windows, as far as Linux can: `python windows_like.py COMMAND...`.

What only POSIX has is taken away after torch and the others are imported, which do without it on Windows: modules such
as fcntl, functions such as os.fork. What Windows refuses is refused: to open a folder, to sync a file that is open for
reading only, to rename or remove a folder while one of its files is open or mapped. Texts are cp1252 where none says
otherwise. Paths stay those of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import shutil
import signal
import stat
import sys
import types
from pathlib import Path
from typing import Any

POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
_FUNCTIONS = ("fork", "register_at_fork", "sched_getaffinity", "getuid", "geteuid", "mkfifo", "statvfs")


def files_in_use() -> set[str]:
    """Return the files that this process has open or mapped."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {os.readlink(link) for link in links if os.path.lexists(link)} | {line[73:] for line in lines}


def _refuse_in_use(folder: Any) -> None:
    if os.path.isdir(folder) and (used := [path for path in files_in_use() if path.startswith(f"{folder}/")]):
        raise PermissionError(errno.EACCES, f"Access is denied: {used}", str(folder))


def become_windows() -> None:
    """Take away and refuse what Windows does, in this process from now on."""
    import fcntl  # not at the top: a test on Windows imports this module

    for name in ("ortgpt", "ortgpt_models"):
        assert name not in sys.modules, f"{name} was imported before"
    for name in POSIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # what makes an import fail
    for name in _FUNCTIONS:
        delattr(os, name)
    for name in ("SIGHUP", "SIGKILL", "pthread_kill"):
        delattr(signal, name)
    real_open, real_sync, real_cdll, real_rename = os.open, os.fsync, ctypes.CDLL, os.rename

    def open_file(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real_open(path, flags, *rest, **options)

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or fcntl.fcntl(descriptor, fcntl.F_GETFL) & 3 == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        real_sync(descriptor)

    def load_library(name: Any, *rest: Any, **options: Any) -> Any:
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        return real_cdll(name, *rest, **options)

    def rename(source: Any, target: Any, **options: Any) -> None:
        _refuse_in_use(source)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(source))
        real_rename(source, target, **options)

    def remove_tree(path: Any, ignore_errors: bool = False, **options: Any) -> None:
        _refuse_in_use(path)
        for folder, _, names in os.walk(path, topdown=False):
            for name in names:
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)

    os.open, os.fsync, os.rename, shutil.rmtree = open_file, sync, rename, remove_tree  # type: ignore[assignment]
    ctypes.CDLL = load_library  # type: ignore[assignment,misc]
    # pathlib would take os.name for a reason to make a WindowsPath, so only the modules that ask for it see another.
    for module in map(importlib.import_module, ("ortgpt.bundle.writing", "ortgpt_models.atomic_folder")):
        vars(module)["os"] = types.SimpleNamespace(**vars(os) | {"name": "nt"})
        vars(module)["sys"] = types.SimpleNamespace(**vars(sys) | {"platform": "win32"})


if __name__ == "__main__":
    for package in ("torch", "onnx", "onnxscript", "safetensors", "tokenizers", "huggingface_hub", "onnxruntime",
                    "click._termui_impl"):  # fmt: skip
        importlib.import_module(package)
    become_windows()
    from ortgpt.cli.main import main

    main(sys.argv[1:])

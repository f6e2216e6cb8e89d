"""The state of an unfinished training, in a folder beside what it will write. Knows no network and no recipe."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ortgpt_models.atomic_folder import locked_folder, sync_file, sync_folder
from ortgpt_models.errors import ModelError
from ortgpt_models.files import file_is_there


class TrainingState:
    """What a training needs to go on after an interruption; one process at a time has it."""

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        """Keep the state in the folder `out`.training; only a training of the same `identity` goes on from it.

        `identity` is whatever decides the result, as JSON: the recipe, digests of the data and of the first weights.
        """
        self.folder = out.with_name(out.name + ".training")
        self.path = self.folder / "state.pt"
        self._identity = json.dumps(identity, sort_keys=True)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the folder for this process alone, and remove it at the end if it is empty."""
        with contextlib.ExitStack() as lock:
            if self._lock(lock) is False:
                raise ModelError(
                    f"another process trains into {self.folder}; wait for it, or choose another name for the checkpoint"
                )
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()

    def _lock(self, lock: contextlib.ExitStack) -> bool | None:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the process that had it has just ended, and removed it
                return lock.enter_context(locked_folder(self.folder))

    def load(self) -> dict[str, Any] | None:
        """Return what save() was given last, or None if there is nothing.

        Raises ModelError for the state of another training, and for a damaged file.
        """
        if not file_is_there(self.path):
            return None
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            identity, values = state["identity"], dict(state["values"])
        except Exception as error:  # a damaged file makes torch raise many kinds
            raise self.damaged(error) from error
        if identity != self._identity:
            raise ModelError(
                f"{self.folder} holds an unfinished training with another configuration, checkpoint or data; "
                "use the same ones, or remove it to start again"
            )
        return values

    def damaged(self, error: Exception) -> ModelError:
        """Return the error for a state that cannot be used."""
        return ModelError(f"{self.path} cannot be read ({error}); remove {self.folder} to start again")

    def save(self, values: Mapping[str, Any]) -> None:
        """Replace the saved state, whole or not at all, by `values`: tensors, numbers, texts and containers of them."""
        partial = self.path.with_suffix(".partial")
        buffer = io.BytesIO()
        torch.save({"identity": self._identity, "values": dict(values)}, buffer)
        try:
            partial.write_bytes(buffer.getbuffer())  # a full disk is an OSError this way
            sync_file(partial)
            os.replace(partial, self.path)
            sync_folder(self.folder)
        finally:
            partial.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the saved state."""
        for path in (self.path, self.path.with_suffix(".partial")):
            path.unlink(missing_ok=True)

"""A loaded model: what a generator, its requests and its conversations share. Holds no state of a call."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.bundle.folder import Bundle
from ortgpt.contract import File, Task, TokenizerKind
from ortgpt.engine.device_topk import open_device_topk
from ortgpt.engine.engine import Engine
from ortgpt.engine.prefill_graph import find_prefill_graph
from ortgpt.engine.prefix_cache import PrefixCache
from ortgpt.errors import BundleError, ClosedError, OptionError, PromptError, shown
from ortgpt.forks import FORKED, fork_count, process_lock
from ortgpt.opening import open_session
from ortgpt.options.generation_config import read_generation_config
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.options.resolved import ResolvedOptions
from ortgpt.ort.session import Session
from ortgpt.sampling.grammar import Grammars
from ortgpt.text.tokenizer import Tokenizer, without_halves

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
Opened = tuple[Bundle, Session, Tokenizer]
OpenParts = tuple[Bundle, Engine, Tokenizer]  # what a LoadedModel is made of


class LoadedModel:
    """An open bundle with its engine, tokenizer, compiled grammars, default options and prefix cache."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        open_again: Callable[[], OpenParts] | None = None,
    ) -> None:
        """Read the bundle's default options; in a forked child, get the three parts from `open_again`.

        Raises BundleError for defaults that this model cannot have.
        """
        self._open_again = open_again
        self.prefixes: PrefixCache | None = None
        self._hold(bundle, engine, tokenizer)

    def _hold(self, bundle: Bundle, engine: Engine, tokenizer: Tokenizer) -> None:
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.prefixes = None if self.prefixes is None else PrefixCache(self.prefixes.size_bytes)
        self._engine: Engine | None = engine
        ends = bundle.config.eos_token_ids
        self.grammars = Grammars(tokenizer, ends[0] if ends else None)
        try:
            self.defaults = read_generation_config(bundle.generation_config, ends)
            check_ids(GenerationOptions().resolve(self.defaults), engine.allowed_vocab_size)
        except OptionError as error:
            raise BundleError(f"{bundle.path / File.GENERATION_CONFIG}: {error}") from None
        self._fork_count = fork_count()  # last, since it tells other threads that the rest is there

    @property
    def engine(self) -> Engine:
        """The engine, which works on token ids. Raises ClosedError after close(), and in a forked child.

        With `open_again`, a forked child opens the bundle at its first use.
        """
        if self._engine is not None and self._fork_count != fork_count():
            self._renew()
        return self.check_open()

    def check_open(self) -> Engine:
        """Return the engine as it is. Raises ClosedError after close()."""
        if self._engine is None:
            raise ClosedError("this generator is closed; load the bundle again")
        return self._engine

    def _renew(self) -> None:
        """Open the bundle in a forked child, where neither ONNX Runtime's threads nor holders of locks exist."""
        if self._open_again is None:
            raise ClosedError(FORKED)
        with process_lock():
            if self._fork_count != fork_count():
                self._hold(*self._open_again())

    def close(self) -> None:
        """Release the model. Closing twice is fine."""
        self._engine = self.prefixes = None

    @property
    def has_text(self) -> bool:
        """Whether the bundle has a tokenizer; without one, prompts and results are token ids."""
        return self.tokenizer.kind != TokenizerKind.NONE

    def size_bytes(self, prompt: Prompt, token_ids: Sequence[int]) -> int:
        """Return how many UTF-8 bytes a prompt has: those of a text itself, or of the text of its `token_ids`.

        A tokenizer that loses something, the case of letters for example, gives ids of another text.
        """
        if isinstance(prompt, str):
            return len(without_halves(prompt).encode())
        return self.tokenizer.size_bytes(token_ids)

    @property
    def start_id(self) -> int:
        """The id that precedes all text (see ModelConfig). Raises PromptError for a model that has none."""
        start_id = self.bundle.config.start_id
        if start_id is not None:
            return start_id
        raise PromptError(
            "the model has no token to start a text from, which an empty prompt needs (bos_token_id or "
            f"eos_token_id in its {File.CONFIG}); give a prompt of at least one token, or export the model again with "
            "--bos-token-id"
        )

    def prompt_ids(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """Return the ids of a prompt. Raises PromptError, which names it, for anything else and for unknown ids."""
        return prompt_ids(prompt, self.tokenizer, self.engine.allowed_vocab_size, name)

    def resolve(self, options: GenerationOptions) -> ResolvedOptions:
        """Return the options with every choice made. Raises OptionError for one that this model cannot have."""
        limit = self.engine.allowed_vocab_size
        if options.stop and not self.has_text:
            raise OptionError(
                "{stop} would have no effect: this bundle has no tokenizer; {eos_token_id.name} ends at token ids",
                {"stop": options.stop, "eos_token_id": None},
            )
        resolved = options.resolve(self.defaults, self.tokenizer.encode if self.has_text else None)
        check_ids(resolved, limit)
        return resolved


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, limit: int, name: str) -> list[int]:
    """Return the ids of a prompt. Raises PromptError, which names it, for anything else and for ids from `limit` on."""
    has_text = tokenizer.kind != TokenizerKind.NONE
    if isinstance(prompt, str) and (has_text or not prompt):
        return tokenizer.encode(prompt) if prompt else []
    items = _items(prompt)
    if items is None:
        accepted = "a sequence of token ids, since this bundle has no tokenizer"
        raise PromptError(
            f"{name} = {shown(prompt)} (accepted: {'a text, or a sequence of token ids' if has_text else accepted})"
        )
    if {*map(type, items)} - {int}:
        for place, item in enumerate(items):
            if isinstance(item, bool) or not isinstance(item, numbers.Integral):
                raise PromptError(f"{name}[{place}] = {shown(item)} (accepted: a token id, 0 to {limit - 1})")
    ids = [int(item) for item in items]
    bad = next((place for place, token_id in enumerate(ids) if not 0 <= token_id < limit), None)
    if bad is not None:
        raise PromptError(
            f"{name}[{bad}]: token id {shown(ids[bad])} is not in the vocabulary (accepted: 0 to {limit - 1})"
        )
    return ids


def _items(prompt: Any) -> list[Any] | None:
    """Return the items of a sequence, an array or a tensor of one axis, as Python's own numbers; None for others."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray)):
        return list(prompt)
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError):
        return None
    return array.tolist() if array.ndim == 1 else None


def open_model(path: str | os.PathLike[str], *, device: str, threads: int | None, verify: str) -> LoadedModel:
    """Open a bundle folder as ortgpt.load() describes it."""
    return LoadedModel(*open_parts(path, device=device, threads=threads, verify=verify))


def open_parts(
    path: str | os.PathLike[str], *, device: str, threads: int | None, verify: str, prefill: str = "auto"
) -> OpenParts:
    """Open a bundle folder as ortgpt.load() describes it, and return what a LoadedModel is made of."""
    opened = open_session(path, (Task.TEXT_GENERATION,), device=device, threads=threads, verify=verify)
    return make_parts(opened, prefill)


def make_parts(opened: Opened, prefill: str) -> OpenParts:
    """Return what a LoadedModel of an opened bundle is made of. Raises BundleError if it has no graph for `prefill`."""
    bundle, session, tokenizer = opened
    engine = Engine(
        session,
        bundle.config,
        masked_tokens=bundle.manifest.masked_tokens,
        prefill_graph=find_prefill_graph(bundle, session, prefill),
        device_topk=open_device_topk(bundle, session),
    )
    return bundle, engine, tokenizer


def check_ids(options: ResolvedOptions, limit: int) -> None:
    """Raise OptionError for an option that names an id beyond the vocabulary, or more ids than it has."""
    for name, ids in (
        ("eos_token_id", options.eos_token_ids),
        ("suppress_tokens", options.suppress_tokens),
        ("logit_bias", options.logit_bias),
        ("bad_words", [token_id for word in options.bad_words_ids for token_id in word]),
    ):
        bad = sorted(token_id for token_id in ids if token_id >= limit)
        if bad:
            raise OptionError(
                f"{{{name}}} is not in the vocabulary (accepted: 0 to {{last}})", {name: bad[0]}, last=limit - 1
            )
    if options.logprobs is not None and options.logprobs > limit:
        raise OptionError.bad_value("logprobs", options.logprobs, f"at most the vocabulary's {limit}")

"""What apps use: load a bundle, then generate, stream, batch, score and choose text. Holds no state of a call."""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.bundle import Bundle, open_bundle
from ortgpt.cache import Cache
from ortgpt.completion import Completion, Piece
from ortgpt.contract import File, Key, Promise
from ortgpt.conversation import Conversation
from ortgpt.engine import Engine
from ortgpt.errors import BundleError, ClosedError, DeviceError, OptionError, PromptError
from ortgpt.generation_defaults import read_generation_config
from ortgpt.grammar import Grammars
from ortgpt.messages import shown
from ortgpt.option_checks import check, read_integer
from ortgpt.options import GenerationOptions
from ortgpt.prefill import find_prefill
from ortgpt.prefixes import PrefixCache
from ortgpt.request import AskedPrompt, Request, check_ids, check_stream
from ortgpt.scoring import Choice, Score, continuation_logprobs, score_ids
from ortgpt.selector import open_selector
from ortgpt.session import plan_session
from ortgpt.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]


def load(
    path: str | os.PathLike[str], *, device: str = "auto", threads: int | None = None, verify: str = "sha256"
) -> Generator:
    """Load a bundle folder; use the result as a context manager, or close() it.

    `device` is "auto", "cpu", "cuda" or "cuda:N"; `threads` the CPU threads of one operator (default: the CPUs this
    process may use). `verify` is "sha256", which reads every file while the model opens, or "size". Raises
    BundleError, DeviceError or OptionError.
    """
    if verify not in ("sha256", "size"):
        raise OptionError(f"verify = {verify!r} (accepted: sha256, size)")
    bundle = open_bundle(path)
    with ThreadPoolExecutor(2) as background:
        hashes = background.submit(bundle.verify_hashes) if verify == "sha256" else None
        try:
            # Reading the tokenizer keeps the interpreter busy: what opening the graph wants of it comes before.
            opening = background.submit(plan_session(bundle, device=device, threads=threads))
            tokenizer = Tokenizer.load(bundle.path)
            session = opening.result()
            selector = open_selector(bundle, session)
        except Exception:
            if hashes is not None:
                hashes.result()  # a damaged file is the better reason
            raise
        if hashes is not None:
            hashes.result()
    if bundle.manifest.precision.promise.get(Key.KIND) == Promise.BATCH_DEPENDENT:
        _logger.warning(
            "%s is batch_dependent: a row's answer changes with the other rows of its batch, and with the length of a "
            "prompt's pieces; `ortgpt quantize` has recipes without that",
            bundle.path,
        )
    masked = bundle.manifest.masked_tokens
    if bundle.config.vocab_size - masked != tokenizer.vocab_size:
        raise BundleError(
            f"{bundle.path}: the tokenizer has {tokenizer.vocab_size} ids, but the model has "
            f"{bundle.config.vocab_size} rows of which {masked} are masked; export it anew"
        )
    prefill = find_prefill(bundle, session)
    engine = Engine(session, bundle.config, masked_tokens=masked, prefill=prefill, selector=selector)
    reload = partial(load, bundle.path, device=device, threads=threads, verify=verify)
    return Generator(bundle, engine, tokenizer, reload=reload)


class Generator:
    """A loaded bundle. Calls are independent of each other and may come from several threads."""

    def __init__(
        self, bundle: Bundle, engine: Engine, tokenizer: Tokenizer, *, reload: Callable[[], Generator] | None = None
    ) -> None:
        """Serve an open bundle; `reload`, which pickles, is what an unpickled generator is loaded by."""
        self._reload = reload
        self.bundle = bundle
        self.tokenizer = tokenizer
        self.prefixes: PrefixCache | None = None
        self._engine: Engine | None = engine
        ends = bundle.config.eos_token_ids
        self.grammars = Grammars(tokenizer, ends[0] if ends else None)
        try:
            self._defaults = read_generation_config(bundle.generation_config, bundle.config.eos_token_ids)
            check_ids(GenerationOptions().resolve(self._defaults), engine.allowed_vocab_size)
        except OptionError as error:
            raise BundleError(f"{bundle.path / File.GENERATION_CONFIG}: {error}") from None

    @property
    def engine(self) -> Engine:
        """The engine under it, which works on token ids. Raises ClosedError after close()."""
        if self._engine is None:
            raise ClosedError("this generator is closed; load the bundle again")
        return self._engine

    def close(self) -> None:
        """Release the model. Closing twice is fine."""
        self._engine = self.prefixes = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path, and what load() was given: what is unpickled loads the bundle anew, for where it is then.

        Raises ClosedError after close(), and PicklingError for a generator that load() did not make.
        """
        if self._engine is None:
            raise ClosedError("this generator is closed; load the bundle again")
        if self._reload is None:
            raise pickle.PicklingError("only a generator that load() made can be pickled")
        return self._reload, ()

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Any) -> Completion:
        """Continue one prompt, a text or token ids; options as in GenerationOptions, as an object or by keyword.

        An empty prompt starts from end-of-text. For several continuations of one prompt use generate_batch(). Raises
        OptionError, UnknownOptionError, PromptError, ContextLengthError (before any work) or NonFiniteLogitsError.
        """
        made = GenerationOptions.make(options, keywords)
        if (made.num_return_sequences or 1) > 1:
            raise OptionError(
                f"num_return_sequences = {made.num_return_sequences} (accepted here: 1; generate_batch([prompt], ...) "
                "returns several)"
            )
        return self.generate_batch([prompt], made)[0]

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        batch_tokens: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **keywords: Any,
    ) -> list[Completion]:
        """Continue several prompts of any lengths at once; each as generate() would.

        `options` may be a list with one a prompt; keywords go for all. The completions are in the order of the prompts,
        `num_return_sequences` for each. Prompts of like lengths are computed together, as long as their caches have no
        more than `batch_tokens` positions in all (by default what 1 GiB holds). `on_progress` hears how many
        continuations are done, and of how many. Raises as generate() does.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise PromptError(f"prompts = {shown(prompts)} (accepted: a list of prompts; generate takes a single one)")
        batch_tokens = read_integer("batch_tokens", batch_tokens, 1, "an integer of 1 or more")
        check("on_progress", on_progress, callable(on_progress), "a function of how many are done, and of how many")
        request = self.prepare(list(prompts), options, keywords, batch_tokens=batch_tokens)
        done = 0
        for active in request.run():
            ended = sum(request.sequences[index].row.finish_reason is not None for index in active)
            done += ended
            if ended and on_progress is not None:
                on_progress(done, len(request.sequences))
        return [each.completion() for each in request.sequences]

    def stream(self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Any) -> Iterator[Piece]:
        """Continue one prompt and yield the text as it comes; the pieces joined are the text of generate().

        The last piece has a finish_reason. Options and prompt are checked at the call, not at the first piece; raises
        as generate() does. Leaving the loop, or close(), ends the work and frees its cache.
        """
        made = GenerationOptions.make(options, keywords)
        check_stream(made)
        return self.prepare([prompt], made).pieces()

    async def agenerate(self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Any) -> Completion:
        """Do as generate(), in a thread, without holding up the event loop; cancelling the task ends it in a step."""
        from ortgpt.aio import run_to_end  # asyncio is for those who use it: it takes a while to import

        return await run_to_end(partial(self.generate, prompt), GenerationOptions.make(options, keywords))

    def astream(
        self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Any
    ) -> AsyncIterator[Piece]:
        """Do as stream(), for `async for`: all work is done in a thread; leaving the loop or cancelling ends it.

        Options and prompt are checked with the first piece.
        """
        from ortgpt.aio import iterate_in_thread

        return iterate_in_thread(partial(self.stream, prompt, options, **keywords))

    def score(self, text: Prompt, *, stride: int | None = None) -> Score:
        """Measure how well the model predicts a text (or ids): nll, perplexity, bits per byte, each token's logprob.

        The first token is predicted from end-of-text. Text beyond the context is scored in windows of n_positions
        with stride n_positions / 2, or `stride`, each token once. Raises PromptError for an empty text.
        """
        if isinstance(text, str):
            text_bytes = text.encode("utf-8", errors="surrogatepass")
            return score_ids(self.engine, self.start_id, self.tokenizer.encode(text), len(text_bytes), stride)
        ids = self.prompt_ids(text, "text")
        size_bytes = sum(len(self.tokenizer.token_bytes(token_id)) for token_id in ids)
        return score_ids(self.engine, self.start_id, ids, size_bytes, stride)

    def choose(self, prompt: Prompt, continuations: Iterable[Prompt], *, normalize: str = "tokens") -> list[Choice]:
        """Rank continuations of a prompt by their likelihood, the likeliest first; the prompt is computed once.

        A continuation's log-likelihood is divided by its "tokens" (the default), by its "bytes", or by nothing
        ("none"). Prompt and continuations become tokens apart from each other: let a continuation begin with its space.
        Raises PromptError, OptionError or ContextLengthError.
        """
        if normalize not in ("tokens", "bytes", "none"):
            raise OptionError(f"normalize = {normalize!r} (accepted: tokens, bytes, none)")
        if isinstance(continuations, str) or not isinstance(continuations, Iterable):
            raise PromptError(f"continuations = {shown(continuations)} (accepted: a list of texts or token ids)")
        given = [self.prompt_ids(each, f"continuations[{place}]") for place, each in enumerate(continuations)]
        if not given or not all(given):
            which = f"continuations[{given.index([])}] is empty" if given else "no continuations"
            raise PromptError(f"{which} (accepted: at least one, of one token or more)")
        found = continuation_logprobs(self.engine, self.prompt_ids(prompt) or [self.start_id], given)
        choices = []
        for index, (ids, logprobs) in enumerate(zip(given, found, strict=True)):
            size_bytes = sum(len(self.tokenizer.token_bytes(token_id)) for token_id in ids)
            over = {"tokens": len(ids), "bytes": size_bytes, "none": 1}[normalize]
            text = self.tokenizer.decode(ids)
            choices.append(Choice(
                index=index, text=text, score=sum(logprobs) / over, probability=0.0, logprob=sum(logprobs),
                token_ids=ids, token_logprobs=logprobs,
            ))  # fmt: skip
        most = max(choice.score for choice in choices)
        total = sum(math.exp(choice.score - most) for choice in choices)
        choices = [replace(choice, probability=math.exp(choice.score - most) / total) for choice in choices]
        return sorted(choices, key=lambda choice: -choice.score)

    def conversation(self, text: Prompt = "") -> Conversation:
        """Begin a running text that keeps what was computed, so that each turn computes only what is new."""
        return Conversation(self, self.prompt_ids(text))

    def prefix_cache(self, *, size_bytes: int) -> PrefixCache:
        """Keep the keys and values of texts from now on, at most `size_bytes`, for what begins like them.

        generate(), generate_batch(), stream() and conversations look there; beams, score(), choose() and what is
        deterministic do not. Returns the cache, whose clear() empties it; a size of 0 turns it off. Raises OptionError
        for a negative size, and DeviceError on a GPU, where rows cannot be begun anew so far.
        """
        size_bytes = read_integer("size_bytes", size_bytes, 0, "an integer of 0 or more") or 0
        if not self.engine.session.device.is_cpu:
            raise DeviceError(f"prefix_cache works on the CPU only so far, and this bundle runs on {self.device}")
        cache = PrefixCache(size_bytes)
        self.prefixes = cache if size_bytes else None
        return cache

    @property
    def device(self) -> str:
        """Where the graph runs: "cpu" or "cuda:N"."""
        return str(self.engine.session.device)

    @property
    def start_id(self) -> int:
        """The id that stands before all text: end-of-text, which GPT-2 uses as its beginning too.

        Raises PromptError for a model that has none.
        """
        bos = self.bundle.config.bos_token_id
        if bos is not None:
            return bos
        if self.bundle.config.eos_token_ids:
            return self.bundle.config.eos_token_ids[0]
        raise PromptError("the model has no end-of-text token to start from; give a prompt of at least one token")

    def prompt_ids(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """Return the ids of a prompt. Raises PromptError, with its `name`, for what is none and for unknown ids."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            array = np.asarray(prompt)
        except (TypeError, ValueError):
            array = np.asarray(None)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise PromptError(f"{name} = {shown(prompt)} (accepted: a text, or a sequence of token ids)")
        ids = [int(token_id) for token_id in array]
        limit = self.engine.allowed_vocab_size
        bad = [token_id for token_id in ids if not 0 <= token_id < limit]
        if bad:
            raise PromptError(f"{name}: token id {bad[0]} is not in the vocabulary (accepted: 0 to {limit - 1})")
        return ids

    def prepare(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None,
        keywords: Mapping[str, Any] = MappingProxyType({}),
        *,
        batch_tokens: int | None = None,
        cache: Cache | None = None,
    ) -> Request:
        """Check prompts and options, and return the request that they make, for what is built on this class.

        `cache`, for one prompt, holds the beginning of its tokens, and stays.
        """
        started = time.perf_counter()
        if not prompts:
            raise PromptError("no prompts (accepted: a list of at least one)")
        if options is None or isinstance(options, GenerationOptions):
            resolved = [GenerationOptions.make(options, keywords).resolve(self._defaults, self.tokenizer.encode)]
            seeds = resolved[0].seeds_for(len(prompts))
            resolved *= len(prompts)
        else:
            if not isinstance(options, Sequence) or len(options) != len(prompts):
                raise OptionError(
                    f"options = {shown(options)} (accepted: a GenerationOptions, or a list with one for each of the "
                    f"{len(prompts)} prompts)"
                )
            resolved = [
                GenerationOptions.make(each, keywords).resolve(self._defaults, self.tokenizer.encode)
                for each in options
            ]
            seeds = [seed for each in resolved for seed in each.seeds_for(1)]
        asked = []
        for place, (prompt, each, seed) in enumerate(zip(prompts, resolved, seeds, strict=True)):
            name = f"prompts[{place}]" if len(prompts) > 1 else "prompt"
            asked.append(AskedPrompt(self.prompt_ids(prompt, name) or [self.start_id], each, seed))
        elapsed_s = time.perf_counter() - started
        return Request(self, asked, batch_tokens=batch_tokens, cache=cache, tokenize_s=elapsed_s)

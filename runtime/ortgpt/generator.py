"""The face that apps use: generate, stream, batch, score and choose. Holds no state of a call."""

from __future__ import annotations

import math
import pickle
from collections import abc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from ortgpt.bundle.folder import Bundle
from ortgpt.conversation import Conversation
from ortgpt.decode.scoring import continuation_logprobs, score_ids
from ortgpt.embedding import Embeddings, embed
from ortgpt.engine.engine import Engine
from ortgpt.engine.prefix_cache import PrefixCache
from ortgpt.errors import DeviceError, OptionError, PromptError, shown
from ortgpt.forks import fork_count, process_lock
from ortgpt.model import LoadedModel, OpenParts, Prompt
from ortgpt.native_call import native_call
from ortgpt.options.generation_options import GenerationOptions
from ortgpt.options.keywords import GenerationKeywords
from ortgpt.options.validation import integer
from ortgpt.ort.cpus import allowed_cpus
from ortgpt.request import Request, check_stream, prepare
from ortgpt.results import Choice, Completion, Piece, Score
from ortgpt.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ortgpt.aio import Turns

_MIN_ASYNC_THREADS = 4


def _open(opening: partial[OpenParts], reload_after_fork: bool) -> Generator:
    return serve(opening(), opening, reload_after_fork)


def serve(parts: OpenParts, opening: partial[OpenParts], reload_after_fork: bool) -> Generator:
    """Return the generator of an open bundle, which `opening` opens again. Raises DeviceError as load() does."""
    bundle, engine, tokenizer = parts
    if reload_after_fork and not engine.session.device.is_cpu:
        raise DeviceError(
            f"reload_after_fork = True works on the CPU only, and this bundle runs on {engine.session.device}: a child "
            "cannot use a GPU that its parent used before the fork; load the bundle in the child"
        )
    # The bundle's path is absolute, whatever the current folder will be.
    again = partial(opening.func, bundle.path, **opening.keywords)
    return Generator(bundle, engine, tokenizer, opening=again, reload_after_fork=reload_after_fork)


class Generator(LoadedModel):
    """A loaded bundle. Calls are independent of each other and may come from several threads."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        opening: partial[OpenParts] | None = None,
        reload_after_fork: bool = False,
    ) -> None:
        """Serve an open bundle, which `opening` opens again after unpickling, and in a forked child if asked for."""
        super().__init__(bundle, engine, tokenizer, open_again=opening if reload_after_fork else None)
        self._opening = opening
        self._reload_after_fork = reload_after_fork
        self._turns: Turns | None = None  # made by the first asynchronous call

    def close(self) -> None:
        """Release the model, and the threads of asynchronous calls once these have ended. Closing twice is fine."""
        super().close()
        self._turns = None

    @property
    def device(self) -> str:
        """Where the graph runs: "cpu" or "cuda:N"."""
        return str(self.engine.session.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path and the arguments of load(); unpickling loads the bundle again, where it happens.

        Raises ClosedError after close(), and PicklingError for a generator that load() did not make.
        """
        self.check_open()
        if self._opening is None:
            raise pickle.PicklingError("only a generator that load() made can be pickled")
        return _open, (self._opening, self._reload_after_fork)

    def generate(
        self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> Completion:
        """Continue one prompt, a text or token ids; options as in GenerationOptions, as an object or by keyword.

        An empty prompt starts from end-of-text. For several continuations of one prompt use generate_batch(). Raises
        OptionError, UnknownOptionError, PromptError, ContextLengthError (before any work) or NonFiniteLogitsError.
        """
        request = self._request(prompt, GenerationOptions.make(options, keywords))
        for _ in request.run():
            pass
        return request.sequences[0].completion()

    def _request(self, prompt: Prompt, options: GenerationOptions) -> Request:
        if (options.num_return_sequences or 1) > 1:
            raise OptionError(
                "{num_return_sequences} (accepted here: 1; generate_batch([prompt], ...) returns several)",
                {"num_return_sequences": options.num_return_sequences},
            )
        return prepare(self, [prompt], options)

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        batch_tokens: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> list[Completion]:
        """Continue several prompts of any lengths at once; each as generate() would.

        `options` may be a list with one for each prompt; keywords apply to all. The completions are in the order of the
        prompts, `num_return_sequences` for each. Prompts of similar lengths are computed together, as long as their
        caches have at most `batch_tokens` positions in all (by default what 1 GiB holds). `on_progress` is called with
        the number of continuations that ended, and of all. Raises as generate() does.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise PromptError(f"prompts = {shown(prompts)} (accepted: a list of prompts; generate takes a single one)")
        prompts = list(prompts)
        batch_tokens = integer(1).read("batch_tokens", batch_tokens)
        if on_progress is not None and not callable(on_progress):
            raise OptionError.bad_value("on_progress", on_progress, "a function of (ended, total)")
        made = _make_all(options, keywords, len(prompts))
        request = prepare(self, prompts, made, batch_tokens=batch_tokens)
        done = 0
        for active in request.run():
            ended = sum(request.sequences[index].row.finish_reason is not None for index in active)
            done += ended
            if ended and on_progress is not None:
                on_progress(done, len(request.sequences))
        return [sequence.completion() for sequence in request.sequences]

    def stream(
        self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> abc.Generator[Piece]:
        """Continue one prompt and yield the text as it comes; the pieces joined are the text of generate().

        The last piece has a finish_reason. Options and prompt are checked at the call, not at the first piece; raises
        as generate() does. Leaving the loop, or close(), ends the work and frees its cache.
        """
        return self._stream_request(prompt, GenerationOptions.make(options, keywords)).pieces()

    def _stream_request(self, prompt: Prompt, options: GenerationOptions) -> Request:
        check_stream(options)
        return prepare(self, [prompt], options)

    async def agenerate(
        self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> Completion:
        """Do as generate() in a thread, so that the event loop goes on. Cancelling the task ends it within a step.

        Asynchronous calls share a few threads of this generator, and take turns.
        """
        return await self._own_threads().result(self._steps(prompt, GenerationOptions.make(options, keywords)))

    def astream(
        self, prompt: Prompt, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKeywords]
    ) -> abc.AsyncGenerator[Piece, None]:
        """Do as stream() in threads, for `async for`. Leaving the loop, or cancelling, ends it.

        Options and prompt are checked at the call, so a server can refuse them before it begins its answer.
        """
        request = self._stream_request(prompt, GenerationOptions.make(options, keywords))
        return self._own_threads().iterate(request.steps())

    def _steps(self, prompt: Prompt, options: GenerationOptions) -> abc.Generator[Completion | None]:
        """Yield None after each step of generate(), and the completion at the end."""
        request = self._request(prompt, options)
        for _ in request.run():
            yield None
        yield request.sequences[0].completion()

    def _own_threads(self) -> Turns:
        with process_lock():
            if self._turns is None or self._turns.fork_count != fork_count():
                with native_call:
                    from ortgpt.aio import Turns  # asyncio takes a while to import, and only those who use it pay

                self._turns = Turns(max(_MIN_ASYNC_THREADS, allowed_cpus()))
            return self._turns

    def score(self, text: Prompt, *, stride: int | None = None) -> Score:
        """Measure how well the model predicts a text (or ids): nll, perplexity, bits per byte, each token's logprob.

        The first token is predicted from end-of-text; a model without one, such as GPT-1, does not predict it. A text
        beyond the context is scored in windows of n_positions with stride n_positions / 2, or `stride`, each token
        once. Raises PromptError for a text with nothing to predict.
        """
        ids = self.prompt_ids(text, "text")
        size_bytes, start_id = self.size_bytes(text, ids), self.bundle.config.start_id
        if start_id is None:
            size_bytes -= self.tokenizer.size_bytes(ids[:1])
            start_id, *ids = ids or [0]
        return score_ids(self.engine, start_id, ids, size_bytes, stride)

    def choose(self, prompt: Prompt, continuations: Iterable[Prompt], *, normalize: str = "tokens") -> list[Choice]:
        """Rank continuations of a prompt by their likelihood, the likeliest first; the prompt is computed once.

        A continuation's log-likelihood is divided by its "tokens" (the default), by its "bytes", or by nothing
        ("none"). Prompt and continuations are encoded separately: let a continuation begin with its space. Raises
        PromptError, OptionError or ContextLengthError.
        """
        if normalize not in ("tokens", "bytes", "none"):
            raise OptionError.bad_value("normalize", normalize, "tokens, bytes, none")
        if isinstance(continuations, str) or not isinstance(continuations, Iterable):
            raise PromptError(f"continuations = {shown(continuations)} (accepted: a list of texts or token ids)")
        if normalize == "bytes" and not self.has_text:
            raise OptionError.bad_value("normalize", normalize, "tokens, none, where there is no tokenizer")
        continuations = list(continuations)
        all_ids = [self.prompt_ids(each, f"continuations[{place}]") for place, each in enumerate(continuations)]
        if not all_ids or not all(all_ids):
            which = f"continuations[{all_ids.index([])}] is empty" if all_ids else "no continuations"
            raise PromptError(f"{which} (accepted: at least one, of one token or more)")
        all_logprobs = continuation_logprobs(self.engine, self.prompt_ids(prompt) or [self.start_id], all_ids)
        scores = []
        for text, ids, logprobs in zip(continuations, all_ids, all_logprobs, strict=True):
            size_bytes = max(1, self.size_bytes(text, ids))  # ids may have no text
            divisor = {"tokens": len(ids), "bytes": size_bytes, "none": 1}[normalize]
            scores.append(sum(logprobs) / divisor)
        total = sum(math.exp(score - max(scores)) for score in scores)
        choices = [
            Choice(
                index=index,
                text=self.tokenizer.decode(ids),
                score=score,
                probability=math.exp(score - max(scores)) / total,
                logprob=sum(logprobs),
                token_ids=ids,
                token_logprobs=logprobs,
            )
            for index, (ids, logprobs, score) in enumerate(zip(all_ids, all_logprobs, scores, strict=True))
        ]
        return sorted(choices, key=lambda choice: -choice.score)

    @overload
    def embed(
        self,
        texts: Iterable[Prompt],
        *,
        pooling: Literal["last", "mean"] = "last",
        normalize: bool = True,
        batch_tokens: int | None = None,
    ) -> Embeddings: ...

    @overload
    def embed(
        self,
        texts: Iterable[Prompt],
        *,
        pooling: Literal["none"],
        normalize: bool = True,
        batch_tokens: int | None = None,
    ) -> list[Embeddings]: ...

    def embed(
        self,
        texts: Iterable[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        batch_tokens: int | None = None,
    ) -> Embeddings | list[Embeddings]:
        """Return an embedding of each text: the last token's hidden state after the last norm, or the "mean" of all.

        float32 (texts, n_embd), in the order of `texts`, which are texts or token ids; with the pooling "none" a list
        of (tokens, n_embd). `normalize` gives every vector the length 1. Texts of similar lengths are computed
        together, as long as they have at most `batch_tokens` positions in all: by default what 256 MiB hold, and on a
        CPU 256, since more are slower. No texts give an array without rows, or an empty list. Raises PromptError, also
        for an empty text, OptionError, ContextLengthError (before any work), NonFiniteLogitsError, and BundleError for
        a bundle without hidden states: a portable one, or one of an earlier version.
        """
        return embed(self, texts, pooling, normalize, batch_tokens)

    def conversation(self, text: Prompt = "") -> Conversation:
        """Begin a text that grows by turns and keeps its cache, so that each turn computes only what is new."""
        return Conversation(self, self.prompt_ids(text))

    def prefix_cache(self, *, size_bytes: int) -> PrefixCache:
        """Cache the keys and values of each computed text, at most `size_bytes`, for later texts with the same prefix.

        generate(), generate_batch(), stream() and conversations use it; beams, score(), choose() and deterministic
        calls do not. Returns the cache, whose clear() empties it; a size of 0 turns it off. Raises OptionError for a
        negative size, and DeviceError on a GPU, which cannot load rows so far.
        """
        size_bytes = integer(0).read("size_bytes", size_bytes) or 0
        if not self.engine.session.device.is_cpu:
            raise DeviceError(f"prefix_cache works on the CPU only so far, and this bundle runs on {self.device}")
        cache = PrefixCache(size_bytes)
        self.prefixes = cache if size_bytes else None
        return cache


def _make_all(
    options: GenerationOptions | Sequence[GenerationOptions] | None, keywords: GenerationKeywords, prompts: int
) -> GenerationOptions | list[GenerationOptions]:
    """Combine options with keywords, once for each object. Raises OptionError for a list of another length."""
    if options is None or isinstance(options, GenerationOptions):
        return GenerationOptions.make(options, keywords)
    if not isinstance(options, Sequence) or len(options) != prompts:
        accepted = f"a GenerationOptions, or a list with one for each of the {prompts} prompts"
        raise OptionError.bad_value("options", options, accepted)
    return [GenerationOptions.make(each, keywords) for each in options]

"""Run a bundle in lm-evaluation-harness as the model "ortgpt"; needs the extra `eval`.

Importing this module registers the model:

    import lm_eval, ortgpt.integrations.lm_eval
    lm_eval.simple_evaluate(model="ortgpt", model_args="pretrained=BUNDLE", tasks=["lambada_openai"])

`python -m ortgpt.integrations.lm_eval` is the command `lm_eval` with the model registered; it asks for a GPU unless
`--device` says otherwise. Versions after 0.4.13 find the model by its entry point, without either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from ortgpt.decode.scoring import cut_pair, likelihoods, rolling_pairs
from ortgpt.errors import BundleError, OptionError, PromptError, shown
from ortgpt.generator import Generator
from ortgpt.loading import load
from ortgpt.options.exclusions import SAMPLING
from ortgpt.options.validation import integer
from ortgpt.ort.package import install_hint

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"no package {error.name}; {install_hint('eval')}", name=error.name) from None

_logger = logging.getLogger(__name__)


@register_model("ortgpt")
class OrtGpt(TemplateLM):
    """A bundle as the harness uses it. The arguments are `model_args`; their names are those of the model "hf"."""

    def __init__(
        self,
        pretrained: str | Generator,
        *,
        device: str = "auto",
        threads: int | None = None,
        verify: str = "sha256",
        batch_size: int | str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        seed: int = 1234,
    ) -> None:
        """Load a bundle, or take a generator that is loaded.

        `device`, `threads` and `verify` are those of ortgpt.load(). `batch_size` is the most prompts that are continued
        together, by default or with "auto" as many as fit; log-likelihoods choose their batches themselves.
        `max_length` is a context shorter than the model's. `prefix_token_id` precedes a text without context, by
        default the model's beginning-of-text or end-of-text. `seed` is that of the first request of a task; each
        further one adds 1. Raises OptionError, BundleError or DeviceError.
        """
        super().__init__()
        if not isinstance(pretrained, Generator):
            pretrained = load(pretrained, device=device, threads=threads, verify=verify)
        self.generator = pretrained
        if not self.generator.has_text:
            raise BundleError(f"{self.generator.bundle.path} has no tokenizer, which the harness needs")
        vocab_size, n_positions = self.generator.engine.allowed_vocab_size, self.generator.engine.config.n_positions
        self.batch_size = integer(1).read("batch_size", None if batch_size == "auto" else batch_size)
        self.max_length = integer(1, n_positions).read("max_length", max_length) or n_positions
        self.max_gen_toks = integer(1).read("max_gen_toks", max_gen_toks)
        self._prefix_token_id = integer(0, vocab_size - 1).read("prefix_token_id", prefix_token_id)
        self._seed = integer(0).read("seed", seed)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text. Raises PromptError for a model without one."""
        ends = self.generator.engine.config.eos_token_ids
        return ends[0] if ends else self.generator.start_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context. Raises PromptError for a model without one."""
        return self.generator.start_id if self._prefix_token_id is None else self._prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """What tells the harness's caches of requests apart."""
        return str(self.generator.bundle.path)

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness notes about the model beside the results."""
        manifest = self.generator.bundle.manifest
        return {"model_dtype": manifest.precision.dtype, "model_sha": manifest.source.sha256}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; names of special tokens in it are these tokens, as for the model "hf"."""
        return self.generator.tokenizer.encode(string, special_tokens=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding gives it."""
        pairs = []
        for texts, context, continuation in requests:
            if not continuation:
                raise PromptError(f"continuation = {shown(texts[1])} adds no token to its context")
            pairs.append(cut_pair(context, continuation, self.max_length))
        cut = sum(len(request[1]) > len(context) for request, (context, _) in zip(requests, pairs, strict=True))
        if cut:
            _logger.warning(
                "%d of %d contexts lost their beginning: the model sees %d tokens", cut, len(pairs), self.max_length
            )
        results: dict[int, tuple[float, bool]] = {}
        found = likelihoods(self.generator.engine, pairs)
        for index, each in tqdm(found, total=len(pairs), desc="log-likelihoods", disable=disable_tqdm):
            results[index] = (each.logprob, each.is_greedy)
            if requests[index][0] is not None:  # a window of a text, which is no request of its own
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
        return [results[index] for index in range(len(pairs))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, by the harness's windows."""
        texts = [request.args[0] for request in requests]
        windows = [rolling_pairs(self.prefix_token_id, self.tok_encode(text), self.max_length) for text in texts]
        flat = [(None, context, ids) for pairs in windows for context, ids in pairs]
        logprobs = iter(self._loglikelihood_tokens(flat, disable_tqdm))
        totals = [sum(next(logprobs)[0] for _ in pairs) for pairs in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, without the text of `until` that ended it; greedy by default."""
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}  # requests with the same options are continued together
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        with tqdm(total=len(requests), desc="generate", disable=disable_tqdm) as bar:
            for indices in groups.values():
                for chunk in _chunks(indices, self.batch_size or len(indices)):
                    arguments = [requests[index].args for index in chunk]
                    seeds = [self._seed + index for index in chunk]
                    found = self._generate([context for context, _ in arguments], arguments[0][1], seeds)
                    for index, text in zip(chunk, found, strict=True):
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                    bar.update(len(chunk))
        return [texts[index] for index in range(len(requests))]

    def _generate(self, contexts: Sequence[str], gen_kwargs: dict[str, Any], seeds: list[int]) -> list[str]:
        options = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        count = options.pop("max_gen_toks")
        if count >= self.max_length:
            raise OptionError(
                f"max_gen_toks = {count} leaves no room for a context (accepted: at most {self.max_length - 1}); give "
                "it in model_args, or in the generation_kwargs of the task"
            )
        until = [text for text in handle_stop_sequences(options.pop("until"), eos=None) if text]
        if options["do_sample"]:
            options.setdefault("seed", seeds)
        else:
            unused = [name for name in SAMPLING if options.pop(name, None)]
            if unused:
                _logger.warning("greedy decoding makes no use of %s", ", ".join(unused))
        prompts = [self.tok_encode(context)[count - self.max_length :] for context in contexts]
        completions = self.generator.generate_batch(prompts, max_new_tokens=count, stop=until or None, **options)
        return [completion.text for completion in completions]


def _chunks(indices: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (indices[begin : begin + size] for begin in range(0, len(indices), size))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

"""Find which tokens a post-processor of `tokenizers` puts around a text, and around and between the two of a pair.

It is measured, not read: a tokenizer of two words runs it. Knows no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, models

from ortgpt.bundle.manifest import PairTemplate, Template
from ortgpt.errors import BundleError
from ortgpt.text.bpe_files import MAX_IDS

# Two words with ids that no tokenizer has.
_FIRST, _SECOND = MAX_IDS, MAX_IDS + 1
_WORDS = {"first": _FIRST, "second": _SECOND}


def template_of(post_processor: Mapping[str, Any]) -> Template | None:
    """Return what a post-processor of a tokenizer.json puts around texts; None if that is no plain template.

    One that repeats or reorders a text is not plain. Raises BundleError for one that `tokenizers` does not run.
    """
    bare = json.loads(Tokenizer(models.WordLevel(_WORDS, unk_token="first")).to_str())
    try:
        tokenizer = Tokenizer.from_str(json.dumps(bare | {"post_processor": dict(post_processor)}))
        single, pair = tokenizer.encode("first").ids, tokenizer.encode("first", "second").ids
    except Exception as error:  # noqa: BLE001  # `tokenizers` raises no other kind
        raise BundleError(f"post_processor: {' '.join(str(error).split())[:200]}") from None
    parts, pair_parts = _split(single, [_FIRST]), _split(pair, [_FIRST, _SECOND])
    if parts is None:
        return None
    of_pair = None
    if pair_parts is not None and pair_parts[1]:
        of_pair = PairTemplate(before=pair_parts[0], between=pair_parts[1], after=pair_parts[2])
    return Template(before=parts[0], after=parts[1], pair=of_pair)


def _split(ids: Sequence[int], words: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the ids before, between and after the words; None unless each occurs once, in this order."""
    places = [place for place, token_id in enumerate(ids) if token_id in (_FIRST, _SECOND)]
    if [ids[place] for place in places] != [*words]:
        return None
    edges = zip([-1, *places], [*places, len(ids)], strict=True)
    return [tuple(ids[begin + 1 : end]) for begin, end in edges]

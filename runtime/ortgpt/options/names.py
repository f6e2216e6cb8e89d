"""What a name that is no option was meant as: another program's name for one, or a misspelt one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortgpt.options.option import Option

# Settings of generation that other programs have, and that are no option here under any name.
_FOREIGN = frozenset(
    {"max_length", "min_length", "best_of", "suffix", "num_beam_groups", "diversity_penalty", "penalty_alpha",
     "epsilon_cutoff", "eta_cutoff", "mirostat", "tfs_z", "force_words_ids", "forced_bos_token_id",
     "forced_eos_token_id", "begin_suppress_tokens", "renormalize_logits"}
)  # fmt: skip


def option_named(name: str, declared: Mapping[str, Option]) -> str | None:
    """Return the option that a name means, here or in another program; None if it means none."""
    if name in declared:
        return name
    return next((known for known, option in declared.items() if name in option.elsewhere), None)


def is_like_an_option(name: str, declared: Mapping[str, Option]) -> bool:
    """Tell whether a name is, or was probably meant as, a setting of generation, here or in another program."""
    import difflib

    if option_named(name, declared) is not None or name in _FOREIGN:
        return True
    known = {*declared, *_FOREIGN, *(each for option in declared.values() for each in option.elsewhere)}
    letters = _letters(name)
    # One letter of a short name may be too much, so "tokens", "length" and "seed_id" are names of the caller's own.
    return bool(difflib.get_close_matches(letters, map(_letters, known), 1, 0.88))


def did_you_mean(unknown: Sequence[str], declared: Mapping[str, Option]) -> str:
    """Return the near names, as the end of a message; all names unless each unknown one has a near one."""
    import difflib

    near = []
    for name in unknown:
        meant = option_named(name, declared)
        guesses = [] if name in _FOREIGN else difflib.get_close_matches(name, declared, 1, 0.5)
        near.append(guesses if meant is None else [meant])
    question = f"; did you mean {', '.join(name for names in near for name in names)}?" if any(near) else ""
    return question if all(near) else f"{question} (accepted: {', '.join(declared)})"


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).lower()

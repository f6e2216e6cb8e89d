"""Build the tokenizers that are not GPT-2's kind with the package `tokenizers`, token for token as `transformers` 5.

Some classes of `transformers` build theirs from a vocabulary: GPT-1's, BERT's, and GPT-2's with a space before the
text. Any other tokenizer.json is taken as it is. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ortgpt.bundle.files import read_text
from ortgpt.contract import File, TokenizerKind
from ortgpt.errors import BundleError, listed, shown
from ortgpt.text.bpe_files import check_ids, parse_merges, read_vocab
from ortgpt.text.json_tokenizer import JsonTokenizer
from ortgpt_exporter.checkpoint.merge_check import Pair
from ortgpt_exporter.checkpoint.tokenizer_folder import (
    TokenizerFiles,
    TokenizerFolder,
    number_notes,
    surrounding_notes,
)
from ortgpt_exporter.checkpoint.tokenizer_json import as_object, read_bpe
from ortgpt_exporter.errors import ExportError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def gpt1_tokenizer(folder: TokenizerFolder) -> Tokenizer:
    """Build GPT-1's: lower case without accents, words split as BERT's, and a BPE that marks the ends of words."""
    if folder.has_json:
        vocab, merges = read_bpe(folder.settings, folder.tokenizer_path)
    else:
        assert folder.pair is not None, "the caller saw one of the two"
        vocab = read_vocab(folder.pair[0])
        merges = parse_merges(read_text(folder.pair[1]), source=str(folder.pair[1]))
    unknown = folder.roles("OpenAIGPTTokenizer")["unk_token"]
    model = _made(
        folder, lambda: models.BPE(vocab, merges, end_of_word_suffix="</w>", unk_token=unknown, fuse_unk=False)
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def gpt2_tokenizer(vocab: Mapping[str, int], merges: Sequence[Pair], *, add_prefix_space: bool) -> Tokenizer:
    """Build GPT-2's, with a space before a text if asked for."""
    tokenizer = Tokenizer(models.BPE(dict(vocab), list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def wordpiece_tokenizer(folder: TokenizerFolder) -> Tokenizer:
    """Build BERT's from a vocab.txt, or from the vocabulary of a tokenizer.json."""
    vocab = _wordpiece_vocab(folder)
    config, roles = folder.config, folder.roles("BertTokenizer")
    tokenizer = Tokenizer(_made(folder, lambda: models.WordPiece(vocab, unk_token=roles["unk_token"])))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=_flag(folder, "tokenize_chinese_chars", True),
        strip_accents=None if config.get("strip_accents") is None else _flag(folder, "strip_accents", False),
        lowercase=_flag(folder, "do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    begin, end = roles["cls_token"], roles["sep_token"]
    if begin in vocab and end in vocab:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin}:0 $A:0 {end}:0",
            pair=f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1",
            special_tokens=[(begin, vocab[begin]), (end, vocab[end])],
        )
    return tokenizer


def _wordpiece_vocab(folder: TokenizerFolder) -> dict[str, int]:
    path = folder.wordpiece_path
    if folder.has_json:
        vocab = as_object(as_object(folder.settings["model"]).get("vocab"))
        return check_ids(vocab, source=f"model.vocab of {folder.tokenizer_path}")
    assert path is not None, "the caller saw one of the two"
    if not read_text(path).strip():
        raise ExportError(f"{path} is empty (accepted: a token in each line)")
    vocab = _made(folder, lambda: models.WordPiece.read_file(str(path)))  # of a token that comes twice, the last counts
    return check_ids(vocab, source=str(path))


def _flag(folder: TokenizerFolder, name: str, default: bool) -> bool:
    value = folder.config.get(name, default)
    if not isinstance(value, bool):
        raise ExportError(f"{folder.path / File.TOKENIZER_CONFIG}: {name} = {shown(value)} (accepted: true, false)")
    return value


def as_it_is(folder: TokenizerFolder) -> tuple[Tokenizer, str]:
    """Read a tokenizer.json as it is, and return it with its text; a dropout, which draws random ids, is left out."""
    text = read_text(folder.tokenizer_path)
    if as_object(folder.settings.get("model")).get("dropout"):
        text = json.dumps(folder.settings | {"model": folder.settings["model"] | {"dropout": None}}, ensure_ascii=False)
    return _made(folder, lambda: Tokenizer.from_str(text)), text


def _made(folder: TokenizerFolder, make: Callable[[], Any]) -> Any:
    """Return what `tokenizers` makes of a folder. Raises ExportError with the reason that it gives."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001  # `tokenizers` raises no other kind
        raise ExportError(
            f"{folder.path}: this tokenizer is damaged, or of a kind that `tokenizers` does not run: "
            f"{' '.join(str(error).split())[:200]}"
        ) from None


def json_files(
    folder: TokenizerFolder,
    tokenizer: Tokenizer,
    *,
    own_text: str | None = None,
    class_name: str,
    reason: str,
    rows: int,
) -> TokenizerFiles:
    """Return the bundle's files of a tokenizer, with the tokens that other files of the folder add to it.

    `own_text` is the tokenizer.json that it was read from, if any; `class_name` the class of `transformers` whose
    special tokens count. Raises ExportError for added tokens that contradict the vocabulary.
    """
    before, vocab = tokenizer.to_str(), tokenizer.get_vocab(with_added_tokens=True)
    declared = folder.declared(class_name)
    stated = _stated(folder, declared)
    known = vocab.keys() | {token.content for _, token in stated}
    flags = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    flags |= {token.content: token for _, token in stated}
    tokenizer.add_tokens([*(token for _, token in stated), *(_declared_token(entry, flags) for entry in declared)])
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    clashes = [f"{shown(token.content)} = {number}" for number, token in stated if vocab[token.content] != number]
    if clashes:
        raise ExportError(f"{folder.path}: added tokens that contradict the vocabulary: {listed(sorted(clashes))}")
    text = str(tokenizer.to_str())
    if own_text is not None and text == before:
        text = own_text
    numbered = {entry["content"]: vocab[entry["content"]] for entry in declared if entry["content"] not in known}
    beyond = {token: number for token, number in vocab.items() if number >= rows}
    unknown = json.loads(text)["model"].get("unk_token")
    if unknown in beyond:
        raise ExportError(
            f"{folder.path}: the tokenizer's token for unknown letters, {shown(unknown)} = {beyond[unknown]}, has no "
            f"row in the model, which has {rows:,}; if the files are GPT-2's kind, say so in {File.TOKENIZER_CONFIG} "
            '("tokenizer_class": "GPT2Tokenizer")'
        )
    if {*beyond.values()} <= tokenizer.get_added_tokens_decoder().keys() and beyond:
        text = _without(text, beyond)
        vocab = {token: number for token, number in vocab.items() if token not in beyond}
        numbered = {token: number for token, number in numbered.items() if token not in beyond}
    else:
        beyond = {}
    try:
        opened = JsonTokenizer(text, source=str(folder.path))
    except BundleError as error:
        raise ExportError(str(error)) from None
    roles = folder.roles(class_name)
    return TokenizerFiles(
        kind=TokenizerKind.TOKENIZER_JSON,
        texts={File.TOKENIZER: text},
        vocab=vocab,
        tokenizer=opened,
        numbered=numbered,
        roles={key: token for key, token in roles.items() if token in vocab},
        tokenizer_json=text,
        notes=(
            f"the bundle needs the package tokenizers (extra [tokenizers]) wherever it runs: {reason}",
            *number_notes(numbered, beyond, rows),
            *surrounding_notes(json.loads(text), folder.config),
        ),
    )


def _stated(folder: TokenizerFolder, declared: Sequence[Mapping[str, Any]]) -> list[tuple[int, AddedToken]]:
    """Return the added tokens that the files state with an id, in the order in which `transformers` adds them."""
    special = {entry["content"] for entry in declared}
    entries = folder.added_entries()  # checks them
    if "added_tokens_decoder" in folder.config:
        entries = folder.config_entries()
    found = {}
    for number, entry in entries:
        flags = {key: entry[key] for key in _FLAGS if isinstance(entry.get(key), bool)}
        if entry.keys() == {"content"}:  # of added_tokens.json
            is_special = entry["content"] in special
            flags = {"normalized": not is_special, "special": is_special}
        flags["special"] = flags.get("special", False) or entry["content"] in special
        found[number] = AddedToken(entry["content"], **flags)
    return sorted(found.items(), key=lambda item: item[0])


def _declared_token(entry: Mapping[str, Any], added: Mapping[str, AddedToken]) -> AddedToken:
    """Return a declared token, with the flags that it states, or else those that the token has in `added`."""
    token = added.get(entry["content"])
    before = {} if token is None else {key: getattr(token, key) for key in _FLAGS}
    stated = {key: entry[key] for key in _FLAGS if isinstance(entry.get(key), bool)}
    return AddedToken(entry["content"], **(before | stated | {"special": True}))


def _without(text: str, tokens: Mapping[str, int]) -> str:
    values = json.loads(text)
    values["added_tokens"] = [entry for entry in values["added_tokens"] if entry["content"] not in tokens]
    return json.dumps(values, ensure_ascii=False)

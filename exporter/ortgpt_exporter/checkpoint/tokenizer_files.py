"""Read the tokenizer of a checkpoint, in any form that Hugging Face folders have, and give the files of a bundle.

GPT-2's kind stays vocab.json and merges.txt; any other that the package `tokenizers` runs becomes one tokenizer.json.
The ids are those of AutoTokenizer of `transformers` 5. Knows no network and no hub.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ortgpt.bundle.manifest import Template
from ortgpt.contract import File, TokenizerKind
from ortgpt.errors import shown
from ortgpt.text.bpe_files import MAX_IDS
from ortgpt.text.ids_only import IdsOnly
from ortgpt.text.json_tokenizer import JsonTokenizer
from ortgpt_exporter.checkpoint.byte_level_files import byte_level_files, read_base, refuse_other
from ortgpt_exporter.checkpoint.json_kinds import (
    as_it_is,
    gpt1_tokenizer,
    gpt2_tokenizer,
    json_files,
    wordpiece_tokenizer,
)
from ortgpt_exporter.checkpoint.merge_check import unreachable_merges
from ortgpt_exporter.checkpoint.surroundings import template_of
from ortgpt_exporter.checkpoint.tokenizer_folder import (
    BERT_CLASS,
    GPT1_CLASS,
    GPT2_CLASS,
    PLAIN_CLASSES,
    SURROUNDINGS,
    TokenizerFiles,
    TokenizerFolder,
    adds_around,
)
from ortgpt_exporter.checkpoint.tokenizer_json import as_object, joins_bytes, other_than_gpt2
from ortgpt_exporter.errors import ExportError


def no_tokenizer(rows: int) -> TokenizerFiles:
    """Return what a bundle without a tokenizer has: no file, and an id for each row of the model."""
    return TokenizerFiles(
        kind=TokenizerKind.NONE,
        texts={},
        vocab={},
        tokenizer=IdsOnly(rows),
        notes=("the bundle has no tokenizer: its calls take and give token ids",),
    )


def read_tokenizer(path: Path, *, rows: int = MAX_IDS, surrounded: bool = False) -> TokenizerFiles:
    """Read vocab.json and merges.txt, tokenizer.json or vocab.txt, and the tokens that other files add to them.

    `path` is a folder, or a file that holds what a tokenizer.json does. OpenAI's names, encoder.json and vocab.bpe, are
    accepted. Special tokens that are declared without an id get one as in `transformers`. Of a model with `rows` rows,
    an added token beyond the last is left out with a note. With `surrounded`, as a classifier needs it, the special
    tokens that a tokenizer.json puts around a text are kept. Raises ExportError for files that are missing, contradict
    each other or are no tokenizer, BundleError for a damaged file, and ModelError if something else than a file has its
    name; each names the file.
    """
    folder = TokenizerFolder(path)
    files = _read(folder, rows)
    return _surrounded(folder, files, rows) if surrounded else files


def _read(folder: TokenizerFolder, rows: int) -> TokenizerFiles:
    if folder.class_name == GPT1_CLASS and (folder.has_json or folder.pair):
        reason = f"it is GPT-1's ({GPT1_CLASS})"
        return json_files(folder, gpt1_tokenizer(folder), class_name=GPT1_CLASS, reason=reason, rows=rows)
    if _is_wordpiece(folder):
        reason = f"it is a WordPiece ({BERT_CLASS})"
        return json_files(folder, wordpiece_tokenizer(folder), class_name=BERT_CLASS, reason=reason, rows=rows)
    others = other_than_gpt2(folder.settings) if folder.has_json else []
    if others and _counts_as_it_is(folder):
        return _as_it_is(folder, others[0], rows)
    return _gpt2_files(folder, bool(others), rows)


def _surrounded(folder: TokenizerFolder, files: TokenizerFiles, rows: int) -> TokenizerFiles:
    """Return the same tokenizer with the special tokens that the folder's tokenizer.json puts around a text.

    Classes of `transformers` that rebuild the tokenizer from its vocabulary keep them, too. A plain template becomes
    part of the manifest; anything else needs the package `tokenizers` at run time, and reads single texts only.
    """
    files = replace(files, notes=tuple(note for note in files.notes if note != SURROUNDINGS))
    is_json = files.kind == TokenizerKind.TOKENIZER_JSON
    if folder.has_json and adds_around(folder.settings):
        processor = folder.settings["post_processor"]
    else:  # a WordPiece is built with one
        processor = json.loads(files.texts[File.TOKENIZER]).get("post_processor") if is_json else None
    if not isinstance(processor, dict) or not adds_around({"post_processor": processor}):
        return files
    template = template_of(processor)
    if template is None and not is_json:
        base = read_base(folder)
        plain = gpt2_tokenizer(base.vocab, base.merges, add_prefix_space=False)
        name = PLAIN_CLASSES[0] if folder.class_name in PLAIN_CLASSES else GPT2_CLASS
        reason = "what it puts around a text is no plain template"
        files = json_files(folder, plain, class_name=name, reason=reason, rows=rows)
        files = replace(files, notes=tuple(note for note in files.notes if note != SURROUNDINGS))
    if template is not None:
        _refuse_beyond(folder, template, min(rows, files.tokenizer.vocab_size))
    files = replace(files, template=template, post_processor=processor)
    values = json.loads(files.texts[File.TOKENIZER]) if files.kind == TokenizerKind.TOKENIZER_JSON else None
    if values is not None and values.get("post_processor") != processor:
        text = json.dumps(values | {"post_processor": processor}, ensure_ascii=False)
        tokenizer = JsonTokenizer(text, source=str(folder.path))
        files = replace(files, texts={File.TOKENIZER: text}, tokenizer=tokenizer, tokenizer_json=text)
    return files


def _refuse_beyond(folder: TokenizerFolder, template: Template, limit: int) -> None:
    """Raise ExportError if the model has no row for a token that surrounds a text."""
    beyond = sorted(token_id for token_id in template.token_ids if token_id >= limit)
    if beyond:
        raise ExportError(
            f"{folder.path}: {File.TOKENIZER} puts the token id {beyond[0]} around a text, and the model has no row "
            f"for it (accepted: 0 to {limit - 1}); use the tokenizer that the model was trained with"
        )


def _is_wordpiece(folder: TokenizerFolder) -> bool:
    """Tell whether BERT's class reads the folder, or nothing but a vocab.txt is there."""
    if folder.has_json:
        model = as_object(folder.settings["model"])
        return folder.class_name == BERT_CLASS and "merges" not in model and isinstance(model.get("vocab"), dict)
    return folder.pair is None and folder.wordpiece_path is not None


def _counts_as_it_is(folder: TokenizerFolder) -> bool:
    """Tell whether tokenizer.json counts as it is.

    It does unless the class is GPT-2's, which takes vocabulary and merges only. Where that cannot have been meant, as
    the tokens are not written in GPT-2's letters, tokenizer.json counts, too.
    """
    return folder.class_name != GPT2_CLASS or not joins_bytes(folder.settings)


def _as_it_is(folder: TokenizerFolder, reason: str, rows: int) -> TokenizerFiles:
    if folder.pair is not None and as_object(folder.settings["model"]).get("type") in ("BPE", None):
        refuse_other(folder)
    tokenizer, text = as_it_is(folder)
    name = folder.class_name
    files = json_files(folder, tokenizer, own_text=text, class_name=name or PLAIN_CLASSES[0], reason=reason, rows=rows)
    notes = []
    if as_object(folder.settings.get("model")).get("dropout"):
        notes.append("model.dropout of tokenizer.json, which makes ids random, is left out")
    if name and name not in PLAIN_CLASSES:
        notes.append(
            f"tokenizer.json is taken as it is; {name} of `transformers` may rebuild the tokenizer from its "
            "vocabulary, unless tokenizer_config.json names the class PreTrainedTokenizerFast"
        )
    return files.with_notes(notes)


def _gpt2_files(folder: TokenizerFolder, has_others: bool, rows: int) -> TokenizerFiles:
    """Return the files of a tokenizer that has GPT-2's vocabulary and merges, by the way in which it uses them."""
    base = read_base(folder)
    files = byte_level_files(folder, base, rows, is_built=has_others)
    if has_others:
        as_it_is(folder)  # what `tokenizers` cannot read is damaged
    unreachable = unreachable_merges(base.merges)
    add_prefix_space = folder.config.get("add_prefix_space")
    is_plain = folder.class_name in PLAIN_CLASSES
    if (add_prefix_space and not is_plain) or unreachable:
        reason = f"add_prefix_space = {shown(add_prefix_space)}"
        if unreachable:
            left, right = unreachable[0]
            reason = f"its merge {shown(left)} {shown(right)} is never reached by the rank of what it joins"
        tokenizer = gpt2_tokenizer(base.vocab, base.merges, add_prefix_space=bool(add_prefix_space and not is_plain))
        name = PLAIN_CLASSES[0] if is_plain else GPT2_CLASS
        other = json_files(folder, tokenizer, class_name=name, reason=reason, rows=rows)
        return other.with_notes([note for note in files.notes if note.startswith("GPT2Tokenizer")])
    return files

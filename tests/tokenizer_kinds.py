"""Folders with a tokenizer of each kind that tiktoken does not express, trained on few sentences; random texts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from support import TEXT, write_small_tokenizer

FAST = "PreTrainedTokenizerFast"


def _save(folder: Path, tokenizer: Any, *, class_name: str | None = FAST, **config: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    if class_name is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name} | config))


def _model_type(folder: Path, name: str, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": name} | values))


def _byte_level(*, normalizer: Any = None, splitter: Any = None) -> Any:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def write_prefix_space(folder: Path) -> None:
    _save(folder, _byte_level(splitter=pre_tokenizers.ByteLevel(add_prefix_space=True)))


def write_digits(folder: Path) -> None:
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    _save(folder, _byte_level(splitter=pre_tokenizers.Sequence(steps)))


def write_nfc_lower_case(folder: Path) -> None:
    _save(folder, _byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])))


def write_pair_with_prefix_space(folder: Path) -> None:
    write_small_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": true}')


def write_unigram(folder: Path) -> None:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT.split(". "), trainer)
    _save(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_byte_fallback(folder: Path) -> None:
    """A BPE as Llama's: spaces as ▁, bytes where there is no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("▁" + TEXT.replace(" ", "▁")) - set("日本語👩\n"))
    merges = [("▁", "t"), ("t", "h"), ("▁", "a"), ("e", "r"), ("i", "n"), ("th", "e"), ("▁", "▁"), ("▁", "the")]
    tokens += [*letters, *("".join(pair) for pair in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    _save(folder, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_wordlevel(folder: Path) -> None:
    words = ["<unk>", *dict.fromkeys(TEXT.replace(",", " ,").split())]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _save(folder, tokenizer, unk_token="<unk>")


def _wordpiece() -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "你好，世界。自然语言"], trainer)
    return tokenizer


def write_vocab_txt(folder: Path) -> None:
    """As Chinese GPT-2s have it: vocab.txt alone, and BERT's class in config.json."""
    vocab = _wordpiece().get_vocab()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__)))
    _model_type(folder, "gpt2", tokenizer_class="BertTokenizer")


def write_vocab_txt_cased(folder: Path) -> None:
    write_vocab_txt(folder)
    config = {"do_lower_case": False, "tokenize_chinese_chars": False, "strip_accents": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_wordpiece_json(folder: Path) -> None:
    tokenizer = _wordpiece()
    tokenizer.decoder = decoders.WordPiece()
    _save(folder, tokenizer, unk_token="[UNK]", eos_token="[SEP]", bos_token="[CLS]", pad_token="<new pad>")


def write_gpt1(folder: Path) -> None:
    """As GPT-1 has it: lower case, and a BPE that marks the ends of words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "don't you e . g ; 1 2 3"], trainer)
    tokenizer.model.save(str(folder))
    _model_type(folder, "openai-gpt")


def write_gpt1_json(folder: Path) -> None:
    """The same saved by `transformers`."""
    from transformers import OpenAIGPTTokenizer

    write_gpt1(folder)
    OpenAIGPTTokenizer.from_pretrained(folder).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()


def write_odd_merges(folder: Path) -> None:
    """GPT-2's kind, with a merge that ranks of joined bytes never reach."""
    write_small_tokenizer(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab |= {"qz": 300, "zx": 301, "qzx": 302}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    with (folder / "merges.txt").open("a") as file:
        file.write("q z\nz x\nq zx\n")


KINDS: dict[str, Callable[[Path], None]] = {
    name.removeprefix("write_"): write
    for name, write in dict(globals()).items()
    if name.startswith("write_") and name != "write_small_tokenizer"
}


def make(kind: str, folder: Path) -> Path:
    """Write a tokenizer of a kind to a new folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind](folder)
    if not (folder / "config.json").exists():
        _model_type(folder, "gpt2")
    return folder


_PARTS = (
    "the", " the", " The", "It's", "don't", "1234", " 56", "  ", "\n", "\t", "\u00a0", "\u2003", "\x00", "\x1f", "é",
    "e\u0301", "日本", "世界。", "👩‍👩‍👧", "\u200d", "\ufeff", "ﬁ", "İ", "ß", "٣", "Ⅷ", "²", "_", "'", "<s>", "[SEP]",
    "<unk>", "</w>", "##ing", "▁", "<0x41>", "<|endoftext|>", "qzx", "Ġ", ".", ", ",
)  # fmt: skip


def texts(count: int, seed: int = 0) -> list[str]:
    """Return random texts of all planes of Unicode, and of parts that tokenizers treat in ways of their own."""
    draw = random.Random(seed)
    return [
        "".join(draw.choice(_PARTS) if draw.random() < 0.6 else _character(draw) for _ in range(draw.randrange(12)))
        for _ in range(count)
    ]


def _character(draw: random.Random) -> str:
    last = draw.choice((0x7F, 0x24F, 0x3000, 0xFFFF, 0x10FFFF))
    point = draw.randrange(last + 1)
    return chr(point) if not 0xD800 <= point < 0xE000 else "\ufffd"

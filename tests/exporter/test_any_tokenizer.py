"""Bundles with tokenizers of other kinds than GPT-2's, and with none: exported, loaded, run, quantised."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer, GPT2LMHeadModel

import ortgpt
from ortgpt import BundleError, OptionError, PromptError
from ortgpt.cli.main import main
from ortgpt.contract import TokenizerKind
from ortgpt_exporter import CheckpointSource, Quantization, export_bundle
from support import greedy_ids, write_checkpoint
from tokenizer_kinds import make, texts

ROWS = 320  # more than any of these tokenizers has ids
KINDS = ("gpt1", "unigram", "vocab_txt", "byte_fallback", "wordlevel", "pair_with_prefix_space")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a start or end token, and with a tokenizer that no test uses."""
    folder = tmp_path_factory.mktemp("any") / "checkpoint"
    return write_checkpoint(
        folder, vocab_size=ROWS, n_layer=1, n_head=2, n_embd=16, bos_token_id=None, eos_token_id=None
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(kind, tmp_path_factory.mktemp("kinds") / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def ids_only(checkpoint: Path) -> Path:
    return export_bundle(CheckpointSource(checkpoint, tokenizer="none"), checkpoint.parent / "ids-only").path


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_of_each_kind_generates(kind: str, checkpoint: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    notes: list[str] = []
    source = CheckpointSource(checkpoint, tokenizer=folders[kind])
    bundle = export_bundle(source, tmp_path / "bundle", on_note=notes.append)
    assert bundle.manifest.tokenizer.kind == TokenizerKind.TOKENIZER_JSON
    assert any("needs the package tokenizers (extra [tokenizers])" in note for note in notes)
    assert not {"vocab.json", "merges.txt"} & bundle.manifest.files.keys()
    theirs = AutoTokenizer.from_pretrained(folders[kind])
    with ortgpt.load(bundle.path) as generator:
        assert bundle.manifest.masked_tokens == ROWS - len(theirs)
        for text in texts(50):
            assert (
                generator.tokenizer.encode(text)
                == theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            )
        prompt = "a single man in"
        ids = theirs(prompt, add_special_tokens=False)["input_ids"]
        done = generator.generate(prompt, max_new_tokens=16, suppress_tokens=range(5))
        assert done.prompt_tokens == len(ids)
        model = GPT2LMHeadModel.from_pretrained(checkpoint)
        suppressed = [*range(5), *range(len(theirs), ROWS)]
        assert done.token_ids == greedy_ids(model, ids, 16, suppress_tokens=suppressed)
        # The text is what it adds to the prompt's.
        whole = theirs.decode(ids + done.token_ids, clean_up_tokenization_spaces=False)
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) + done.text == whole
        pieces = [piece.text for piece in generator.stream(prompt, max_new_tokens=16, suppress_tokens=range(5))]
        assert "".join(pieces) == done.text
        assert len(pieces) > 2
        assert generator.generate_batch([prompt, "a"], max_new_tokens=16, suppress_tokens=range(5))[0].text == done.text
        _check_stop(generator, prompt, done.text)


def _check_stop(generator: ortgpt.Generator, prompt: str, text: str) -> None:
    stop = text[5:7]
    options: dict[str, Any] = {"max_new_tokens": 16, "suppress_tokens": range(5), "stop": stop}
    done = generator.generate(prompt, **options)
    assert (done.text, done.stop_reason) == (text[: text.index(stop)], stop)
    beams = generator.generate_batch([prompt], num_beams=2, **options)[0]
    assert stop not in beams.text
    conversation = generator.conversation(prompt)
    assert conversation.generate("", **options).text == done.text
    if (
        generator.bundle.manifest.tokenizer.kind == TokenizerKind.TOKENIZER_JSON
        and not generator.tokenizer.is_byte_level
    ):
        assert conversation.text.startswith(generator.tokenizer.decode(generator.tokenizer.encode(prompt)))
    conversation.generate(" of", max_new_tokens=4)


def test_a_lossy_tokenizer_is_scored_by_the_bytes_of_the_text_itself(
    checkpoint: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = CheckpointSource(checkpoint, tokenizer=folders["gpt1"], bos_token_id=0)
    bundle = export_bundle(source, tmp_path / "bundle")
    with ortgpt.load(bundle.path) as generator:
        text = "Café  MAN"
        score = generator.score(text)
        assert score.text_bytes == len(text.encode())
        assert generator.score(score.token_ids).text_bytes == len("cafe man")
        first, second = generator.choose("a", [" MAN", "man"], normalize="bytes")
        by_index = {choice.index: choice for choice in (first, second)}
        assert by_index[0].token_ids == by_index[1].token_ids
        assert by_index[0].score == pytest.approx(by_index[1].score * 3 / 4)
        # A text begun from nothing has no space before it, one that goes on has.
        begun = generator.generate("", max_new_tokens=8)
        assert begun.text == generator.tokenizer.decode(begun.token_ids)
        with pytest.raises(OptionError, match=r"grammar needs a byte-level tokenizer.*'tokenizer-json'"):
            generator.generate("a", grammar=["x", "y"])


def test_a_byte_level_tokenizer_follows_a_grammar(checkpoint: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    source = CheckpointSource(checkpoint, tokenizer=folders["pair_with_prefix_space"], eos_token_id=0)
    bundle = export_bundle(source, tmp_path / "bundle")
    with ortgpt.load(bundle.path) as generator:
        assert generator.generate("a", grammar=["yes", "nein"], max_new_tokens=8).text in ("yes", "nein")


def test_a_draft_model_needs_the_same_tokenizer(
    checkpoint: Path, folders: dict[str, Path], ids_only: Path, tmp_path: Path
) -> None:
    bundles = [
        export_bundle(CheckpointSource(checkpoint, tokenizer=folders[kind]), tmp_path / kind).path
        for kind in ("unigram", "wordlevel")
    ]
    with ortgpt.load(bundles[0]) as one, ortgpt.load(bundles[0]) as same, ortgpt.load(bundles[1]) as other:
        plain = one.generate("a man", max_new_tokens=8)
        assert one.generate("a man", max_new_tokens=8, assistant_model=same).token_ids == plain.token_ids
        with pytest.raises(OptionError, match="has another tokenizer"):
            one.generate("a man", assistant_model=other)
        with ortgpt.load(ids_only) as ids, pytest.raises(OptionError, match="has another tokenizer"):
            one.generate("a man", assistant_model=ids)


@pytest.mark.parametrize("kind", ["gpt1", "vocab_txt", "byte_fallback"])
def test_a_portable_bundle_gives_the_same_ids_in_transformers(
    kind: str, checkpoint: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = CheckpointSource(checkpoint, tokenizer=folders[kind])
    bundle = export_bundle(source, tmp_path / "bundle", flavour="portable")
    own, theirs = AutoTokenizer.from_pretrained(bundle.path), AutoTokenizer.from_pretrained(folders[kind])
    batch = texts(300)
    for special in (False, True):
        assert (
            own(batch, add_special_tokens=special)["input_ids"]
            == theirs(batch, add_special_tokens=special)["input_ids"]
        )
    with ortgpt.load(bundle.path) as generator:
        assert generator.generate("a single", max_new_tokens=4).text


class MissingPackage:
    """Let an import of tokenizers fail."""

    def __init__(self, fault: ImportError) -> None:
        self.fault = fault

    def find_spec(self, name: str, *rest: Any) -> None:
        if name == "tokenizers":
            raise self.fault


def test_a_missing_package_is_one_line_with_its_command(
    checkpoint: Path, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = export_bundle(CheckpointSource(checkpoint, tokenizer=folders["unigram"]), tmp_path / "bundle").path
    for fault, reason in (
        (ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers"), "is not installed"),
        (ImportError("libfoo.so: cannot open"), r"cannot be imported \(libfoo\.so: cannot open\)"),
    ):
        finder = MissingPackage(fault)
        monkeypatch.delitem(sys.modules, "tokenizers")
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        message = f"needs the package tokenizers, which {reason}; run `pip install"
        with pytest.raises(BundleError, match=message) as caught:
            ortgpt.load(bundle)
        assert "\n" not in str(caught.value)
        monkeypatch.undo()


def test_a_damaged_tokenizer_json_is_named(checkpoint: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = export_bundle(CheckpointSource(checkpoint, tokenizer=folders["unigram"]), tmp_path / "bundle").path
    text = (bundle / "tokenizer.json").read_text()
    (bundle / "tokenizer.json").write_text(text.replace('"version"', '"verzion', 1) + " ")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        ortgpt.load(bundle)
    (bundle / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        ortgpt.load(bundle)


def test_calls_on_ids(ids_only: Path, checkpoint: Path) -> None:
    with ortgpt.load(ids_only) as generator:
        assert generator.bundle.manifest.tokenizer.kind == TokenizerKind.NONE
        assert generator.bundle.manifest.masked_tokens == 0
        want = greedy_ids(GPT2LMHeadModel.from_pretrained(checkpoint), [5, 6, 319], 8)
        done = generator.generate([5, 6, 319], max_new_tokens=8)
        assert (done.text, done.token_ids) == ("", want)
        pieces = list(generator.stream([5, 6, 319], max_new_tokens=8))
        assert [piece.token_ids for piece in pieces] == [[token_id] for token_id in want]
        assert {piece.text for piece in pieces} == {""}
        assert pieces[-1].finish_reason == "length"
        conversation = generator.conversation([5, 6])
        assert conversation.generate([319], max_new_tokens=8).token_ids == want
        assert conversation.text == ""
        assert conversation.token_ids == [5, 6, 319, *want]
        beams = generator.generate_batch([[5, 6, 319]], num_beams=2, max_new_tokens=4)[0]
        assert (beams.text, len(beams.token_ids)) == ("", 4)
        choices = generator.choose([5], [[6], [7, 8]])
        assert {choice.text for choice in choices} == {""}
        assert generator.generate([5], bad_words=[[want[0]]], max_new_tokens=2).token_ids


def test_ids_only_refuses_text_in_one_line(ids_only: Path) -> None:
    with ortgpt.load(ids_only) as generator:
        for call in (generator.generate, generator.stream, generator.score, generator.conversation):
            with pytest.raises(
                PromptError, match=r"= 'text' \(accepted: a sequence of token ids, since .* no tokenizer\)"
            ):
                call("text")
        for prompt, fault in (([1.5], "1.5"), ([True], "True"), (["a"], "'a'")):
            with pytest.raises(PromptError) as caught:
                generator.generate(prompt)  # type: ignore[arg-type]  # as a caller may get it wrong
            assert str(caught.value) == f"prompt[0] = {fault} (accepted: a token id, 0 to 319)"
            with pytest.raises(PromptError, match="is not in the vocabulary"):
                generator.tokenizer.decode(prompt)  # type: ignore[arg-type]  # as above
        with pytest.raises(PromptError, match=r"^prompt = 5 \(accepted: a sequence of token ids, since this bundle"):
            generator.generate(5)  # type: ignore[arg-type]  # as above
        with pytest.raises(PromptError, match="give token ids"):
            generator.tokenizer.encode("text")
        with pytest.raises(OptionError, match=r"stop = \(.a.,\) would have no effect: this bundle has no tokenizer"):
            generator.generate([1], stop="a")
        with pytest.raises(OptionError, match=r"bad_words = 'a' .*token ids"):
            generator.generate([1], bad_words="a")
        with pytest.raises(OptionError, match="needs a byte-level tokenizer"):
            generator.generate([1], grammar=["a"])
        with pytest.raises(OptionError, match="normalize = 'bytes'"):
            generator.choose([1], [[2]], normalize="bytes")
        with pytest.raises(PromptError, match="no token to start a text from"):
            generator.generate("")


def test_scores_of_ids_have_no_bytes(checkpoint: Path, tmp_path: Path) -> None:
    source = CheckpointSource(checkpoint, tokenizer="none", bos_token_id=7, eos_token_id=3)
    bundle = export_bundle(source, tmp_path / "bundle")
    with ortgpt.load(bundle.path) as generator:
        score = generator.score([1, 2, 3])
        assert (score.text_bytes, score.tokens) == (0, 3)
        assert math.isnan(score.bits_per_byte)
        assert generator.generate("", max_new_tokens=3).prompt_tokens == 1
    (tmp_path / "ids.txt").write_text("1 2\n3\n")
    shown = CliRunner().invoke(main, ["score", str(bundle.path), str(tmp_path / "ids.txt")])
    assert shown.exit_code == 0, shown.output
    assert "tokens         3" in shown.output
    assert "bits_per_byte" not in shown.output
    shown = CliRunner().invoke(main, ["score", str(bundle.path), str(tmp_path / "ids.txt"), "--json"])
    values = json.loads(shown.output)
    assert (values["bits_per_byte"], values["tokens"]) == (None, 3)
    assert values["nll"] == pytest.approx(score.nll)


def test_the_command_line_reads_and_writes_ids(ids_only: Path, tmp_path: Path) -> None:
    with ortgpt.load(ids_only) as generator:
        ids = generator.generate([12, 7, 99], max_new_tokens=5).token_ids
    new = " ".join(map(str, ids))
    run = ["generate", str(ids_only)]
    tokens = ["--max-new-tokens", "5"]
    for options, output in (
        ([], f"{new}\n"),
        (["--echo"], f"12 7 99 {new}\n"),
        (["--num-return-sequences", "2", "--seed", "1", "--top-k", "1"], f"{new}\n---\n{new}\n"),
    ):
        shown = CliRunner().invoke(main, [*run, "12 7 99", *tokens, *options])
        assert (shown.exit_code, shown.output) == (0, output)
    shown = CliRunner().invoke(main, [*run, "-", *tokens], input="12\n 7 99\n")
    assert shown.output == f"{new}\n"
    shown = CliRunner().invoke(main, [*run, "12 7 99", *tokens, "--json"])
    assert json.loads(shown.output)["token_ids"] == ids
    assert json.loads(shown.output)["text"] == ""
    shown = CliRunner().invoke(main, [*run, "12 7 99", *tokens, "--logprobs", "2"])
    assert shown.stderr.startswith(f"{ids[0]} ")
    for prompt, message in (("12 x", "'x' is no token id"), ("12 320", "token id 320 is not in the vocabulary")):
        shown = CliRunner().invoke(main, [*run, prompt])
        assert shown.exit_code == 1
        assert message in shown.output
    shown = CliRunner().invoke(main, ["chat", str(ids_only)])
    assert "chat needs a bundle with a tokenizer" in shown.output
    for name, line in (("p.jsonl", "[12, 7, 99]"), ("q.jsonl", '"12 7 99"'), ("r.txt", "12 7 99")):
        (tmp_path / name).write_text(f"{line}\n")
        shown = CliRunner().invoke(main, [*run, "--input", str(tmp_path / name), *tokens])
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["token_ids"] == ids


@pytest.mark.parametrize("kind", ["none", "gpt1"])
def test_both_kinds_are_quantised(kind: str, checkpoint: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    source = CheckpointSource(checkpoint, tokenizer=folders.get(kind, kind))
    quantization = Quantization(dtype="int8", max_perplexity_ratio=2.0)
    bundle = export_bundle(source, tmp_path / "bundle", dtype="int8", quantization=quantization)
    evidence = bundle.manifest.evidence
    assert evidence is not None
    assert evidence.tokens == 16 * 63
    assert (evidence.bits_per_byte is None) == (kind == "none")
    shown = CliRunner().invoke(main, ["info", str(bundle.path)])
    assert shown.exit_code == 0
    assert ("bits per byte" in shown.output) == (kind != "none")
    assert ("none: calls take and give token ids" in shown.output) == (kind == "none")
    with ortgpt.load(bundle.path) as generator:
        assert len(generator.generate([5, 6], max_new_tokens=4).token_ids) == 4


def test_a_file_of_ids_measures_a_bundle_of_ids(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text(" ".join(str(number % ROWS) for number in range(300)))
    (tmp_path / "text.txt").write_text("a text " * 100)
    source = CheckpointSource(checkpoint, tokenizer="none")
    for name in ("ids.txt", "text.txt"):
        quantization = Quantization(dtype="int8", max_perplexity_ratio=2.0, eval_text=tmp_path / name)
        if name == "text.txt":
            with pytest.raises(ortgpt.OrtGptError, match=r"text\.txt: 'a' is no token id"):
                export_bundle(source, tmp_path / "c", dtype="int8", quantization=quantization)
            continue
        evidence = export_bundle(source, tmp_path / "b", dtype="int8", quantization=quantization).manifest.evidence
        assert evidence is not None
        assert (evidence.text, evidence.bits_per_byte) == ("ids.txt", None)


def test_a_portable_bundle_of_ids(checkpoint: Path, tmp_path: Path) -> None:
    source = CheckpointSource(checkpoint, tokenizer="none")
    bundle = export_bundle(source, tmp_path / "bundle", flavour="portable")
    assert not {"tokenizer.json", "tokenizer_config.json"} & bundle.manifest.files.keys()
    with ortgpt.load(bundle.path) as generator:
        assert len(generator.generate([5, 6], max_new_tokens=4).token_ids) == 4

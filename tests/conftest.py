"""Bundles that many tests read; each is exported once a run."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for a hub

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from transformers import GPT2LMHeadModel

import ortgpt
from classifiers import Exported, write_classifier
from ortgpt_exporter import Quantization, export_bundle
from support import write_checkpoint, write_standin

# The reader of damaged bundles bounds its memory by limits of POSIX.
collect_ignore = ["runtime/test_fuzz.py"] if sys.platform == "win32" else []

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, four heads of 12, which the export pads to 16."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint")


@pytest.fixture(scope="session")
def small_bundle(small_checkpoint: Path) -> Path:
    return export_bundle(small_checkpoint, small_checkpoint.parent / "bundle").path


@pytest.fixture(scope="session")
def small_model(small_checkpoint: Path) -> GPT2LMHeadModel:
    return GPT2LMHeadModel.from_pretrained(small_checkpoint).eval()


@pytest.fixture(scope="session")
def small(small_bundle: Path) -> Iterator[ortgpt.Generator]:
    with ortgpt.load(small_bundle) as generator:
        yield generator


@pytest.fixture(scope="session")
def small_portable(small_checkpoint: Path) -> Iterator[ortgpt.Generator]:
    bundle = export_bundle(small_checkpoint, small_checkpoint.parent / "portable", flavour="portable")
    with ortgpt.load(bundle.path) as generator:
        yield generator


@pytest.fixture(scope="session")
def fast_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two graphs, of which the one for long prompts is opened when it is first wanted."""
    folder = tmp_path_factory.mktemp("fast")
    checkpoint = write_checkpoint(folder / "checkpoint", n_embd=64)
    quantization = Quantization(dtype="int8", max_perplexity_ratio=2.0)
    return export_bundle(checkpoint, folder / "bundle", dtype="int8", quantization=quantization).path


@pytest.fixture(scope="session")
def text_classifier(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Three labels, one of which a text has; the heads of 12 are padded to 16."""
    return _export_classifier(tmp_path_factory.mktemp("text_classifier"), "text")


@pytest.fixture(scope="session")
def token_classifier(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _export_classifier(tmp_path_factory.mktemp("token_classifier"), "token")


def _export_classifier(folder: Path, kind: str) -> Exported:
    model = write_classifier(folder / "checkpoint", kind, id2label={0: "bad", 1: "fair", 2: "good"})
    return Exported(model, folder / "checkpoint", export_bundle(folder / "checkpoint", folder / "bundle").path)


@pytest.fixture(scope="session")
def standin_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 small, random, with the real vocabulary and an added token."""
    return write_standin(tmp_path_factory.mktemp("standin") / "checkpoint")


@pytest.fixture(scope="session")
def standin_bundle(standin_checkpoint: Path) -> Path:
    return export_bundle(standin_checkpoint, standin_checkpoint.parent / "bundle").path


@pytest.fixture(scope="session")
def austen_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle("austen", tmp_path_factory.mktemp("austen") / "bundle").path

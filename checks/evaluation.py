"""Compare the figures of lm-evaluation-harness with its own model "hf" and with ours, on the same float32 weights.

    PYTHONPATH=tests python checks/evaluation.py

`make check-eval` runs it in an environment that has the harness. The tasks, one or two of each kind, are made by rule
from this project's LICENSE and need no network. Each answer is compared; `ortgpt eval` has to give the same figures.
"""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DISABLE_MULTIPROC": "1", "TQDM_DISABLE": "1"}

import contextlib
import io
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

import ortgpt
import ortgpt.integrations.lm_eval  # registers the model
from ortgpt.tools.evaluate import evaluate_file
from ortgpt_exporter import export_bundle
from support import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-3  # of a log-likelihood in nats, the sum of up to 2,000 tokens
SMALL_CONTEXT = 64

# What a task of each kind has beside its file.
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "completion": {
        "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{' ' + target}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generate": {
        "output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": [".", "\n\n"], "max_gen_toks": 24}, "metric_list": [{"metric": "exact_match"}],
    },
    "generate_on": {
        "output_type": "generate_until", "doc_to_text": "{{context}}", "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": "the", "do_sample": False, "temperature": 0.0, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def write_tasks(folder: Path, text: str) -> dict[str, Path]:
    """Write the tasks and their rows into a folder; return the file of each."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    paragraphs = [part for part in paragraphs if len(part.split()) > 8]
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in map(str.split, paragraphs)]
    completions = [{"context": " ".join(a), "target": " ".join(b[:2])} for a, b in halves]
    completions += [{"context": "", "target": "License"}, {"context": "It is “naïve” to license", "target": "日本"}]
    # What greedy decoding gives with the bundled model.
    completions += [
        {"context": "It is a truth", "target": "of a man"},
        {"context": "Mr. Darcy was", "target": "a very agreeable man"},
    ]
    choices = [
        {"context": " ".join(a[-40:]), "choices": [" ".join(b[:3]), " ".join(other[:4])], "answer": 0}
        for (a, b), (_, other) in zip(halves, halves[1:] + halves[:1], strict=True)
    ]
    choices += [{"context": "", "choices": ["the", "License"], "answer": 1}]
    rows: dict[str, Sequence[Mapping[str, Any]]] = {
        "choice": choices,
        "completion": completions,
        "rolling": [{"text": part} for part in paragraphs[:12]] + [{"text": text[:6000]}, {"text": "日本\n"}],
        "generate": completions[:12],
        "generate_on": completions[:12],
    }
    files = {}
    for name, values in rows.items():
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in values), encoding="utf-8")
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(files[name])}},
            "test_split": "test", **TASKS[name],
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return files


def harness(model: str, arguments: dict[str, Any], folder: Path, tasks: Sequence[str]) -> Any:
    """Return what the harness finds with a model, its answers to each request included."""
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its bootstrap there
        return lm_eval.simple_evaluate(
            model=model, model_args=arguments, tasks=list(tasks), bootstrap_iters=2000,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )  # fmt: skip


def answers(results: Any, task: str) -> list[Any]:
    """Return the answers to the requests of a task: texts, log-likelihoods, or those with whether greedy."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer[0] for sample in samples for answer in sample["resps"]]


def difference(one: Any, other: Any) -> float:
    """Return how far two answers are apart; infinity where they differ in more than rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other)
    if isinstance(one, (tuple, list)) and not isinstance(one, str):
        return math.inf if one[1] != other[1] else difference(float(one[0]), float(other[0]))
    return 0.0 if one == other else math.inf


def compare(name: str, checkpoint: Path, folder: Path, tasks: Sequence[str], files: Mapping[str, Path]) -> bool:
    """Compare the two models, and the command, on a checkpoint; write a line for each task. Tell whether all agree."""
    bundle = export_bundle(checkpoint, folder / f"{name}.bundle").path
    theirs = harness("hf", {"pretrained": str(checkpoint), "dtype": "float32", "device": "cpu"}, folder, tasks)
    ours = harness("ortgpt", {"pretrained": str(bundle)}, folder, tasks)
    agree = True
    for task in tasks:
        pairs = list(zip(answers(theirs, task), answers(ours, task), strict=True))
        apart = max(difference(*pair) for pair in pairs)
        figures = {key.partition(",")[0]: each for key, each in theirs["results"][task].items() if "," in key}
        own = {key.partition(",")[0]: each for key, each in ours["results"][task].items() if "," in key}
        same = apart <= TOLERANCE and all(near(figures[key], own[key]) for key in figures)
        if task in ("choice", "completion", "rolling"):
            with ortgpt.load(bundle) as generator:
                metrics = evaluate_file(generator, files[task]).metrics
            for key, metric in metrics.items():
                same = same and near(figures[key], metric.value)
                if key != "perplexity":  # there the harness draws samples
                    expected = figures.get(f"{key}_stderr", "N/A")
                    same = same and (metric.stderr is None if expected == "N/A" else near(expected, metric.stderr))
        agree = agree and same
        shown = ", ".join(f"{key} {each:,.4f}" for key, each in own.items() if isinstance(each, float))
        print(
            f"{name:<7} {task:<12} {len(pairs):>4} answers, at most {apart:.1e} apart: {'same' if same else 'DIFFERS'}"
        )
        print(f"        {shown}")
    return agree


def near(one: Any, other: Any) -> bool:
    """Whether two figures are the same but for rounding."""
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-9)


def command_gives(folder: Path, bundle: Path) -> bool:
    """Run the harness's command with our model; tell whether it shows the accuracy."""
    command = [
        sys.executable, "-m", "ortgpt.integrations.lm_eval", "run", "--model", "ortgpt", "--model_args",
        f"pretrained={bundle}", "--tasks", "choice", "--include_path", str(folder), "--limit", "3", "--device", "auto",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    works = done.returncode == 0 and "acc_norm" in done.stdout
    print(f"python -m ortgpt.integrations.lm_eval: {'works' if works else done.stdout + done.stderr}")
    return works


def main() -> int:
    """Run the comparison; return its exit code."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_tasks(folder, text)
        small = write_checkpoint(folder / "small", n_positions=SMALL_CONTEXT)  # many rows exceed this context
        austen = ROOT / "models/ortgpt_models/checkpoints/austen"
        agree = compare("small", small, folder, [task for task in TASKS if task != "generate"], files)
        agree = compare("austen", austen, folder, list(TASKS), files) and agree
        agree = command_gives(folder, folder / "austen.bundle") and agree
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

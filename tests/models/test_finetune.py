from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, OpenAIGPTLMHeadModel

import ortgpt_models.finetune
from ortgpt_models import GPT, ModelError, finetune_network, load_network, save_gpt
from ortgpt_models.config import GPTConfig
from ortgpt_models.finetune import FineTuningResult, finetune
from ortgpt_models.finetune_config import FineTuneConfig
from ortgpt_models.finetune_network import FineTuned, with_new_tokens
from ortgpt_models.hf_checkpoint import save_classifier
from ortgpt_models.progress import Progress
from ortgpt_models.task_data import Example, TaskData

NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "head_dropout": 0.0}
START, DELIMITER, EXTRACT = 0, 20, 21


def network(norm: str = "pre", **shape: Any) -> GPT:
    torch.manual_seed(3)
    config: dict[str, Any] = {
        "vocab_size": 20,
        "n_positions": 12,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "norm": norm,
    } | shape
    gpt = GPT(GPTConfig(bos_token_id=0, eos_token_id=0, **config)).eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return gpt


def texts(count: int, seed: int = 0) -> tuple[Example, ...]:
    """Rows whose label is whether their first token is above 9."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(1, 20, (int(torch.randint(2, 8, (1,), generator=draw)),), generator=draw).tolist()
        made.append(Example(((START, *ids, EXTRACT),), int(ids[0] > 9)))
    return tuple(made)


def data(task: str = "classification", **values: Any) -> TaskData:
    fields: dict[str, Any] = {
        "labels": ("no", "yes"), "problem_type": "single_label_classification", "training": texts(24),
        "held_out": texts(8, seed=1),
    }  # fmt: skip
    return TaskData(task=task, **(fields | values))


def run(out: Path, values: TaskData, gpt: GPT | None = None, **options: Any) -> FineTuningResult:
    """Fine-tune; the written checkpoint stands at `out`."""

    def write(result: FineTuningResult) -> None:
        out.mkdir()
        save_classifier(result.classifier, out)

    settings = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-2} | options
    calls = {name: settings.pop(name) for name in ("on_progress", "on_note") if name in settings}
    config = FineTuneConfig(**settings)
    return finetune(
        gpt or network(), values, out, config=config, new_ids=(DELIMITER, EXTRACT), start_id=START, source="ab",
        write=write, **calls,
    )  # fmt: skip


def reference(norm: str, folder: Path, model: FineTuned) -> Any:
    save_gpt(model.gpt, folder)
    return {"pre": GPT2LMHeadModel, "post": OpenAIGPTLMHeadModel}[norm].from_pretrained(folder).eval()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_joint_loss_is_that_of_the_paper(norm: str, tmp_path: Path) -> None:
    """L3 = L2 + weight x L1, by the networks of transformers, a row at a time."""
    gpt = with_new_tokens(network(norm), FineTuneConfig(**NO_DROPOUT), (DELIMITER, EXTRACT))
    model = FineTuned(gpt, data(), 0.0)
    examples = texts(5)
    task_loss, language_loss = model.losses(examples, with_language=True)
    theirs = reference(norm, tmp_path, model)
    expected_task, expected_language = [], []
    for example in examples:
        ids = torch.tensor(example.rows)
        hidden = theirs.transformer(ids)[0]
        logits = hidden[0, -1] @ model.score.weight.T
        expected_task.append(-torch.log_softmax(logits, 0)[int(example.target)])
        expected_language.append(theirs(ids, labels=ids).loss)
    assert task_loss.item() == pytest.approx(torch.stack(expected_task).mean().item(), rel=1e-5)
    assert language_loss is not None
    assert language_loss.item() == pytest.approx(torch.stack(expected_language).mean().item(), rel=1e-5)
    alone, nothing = model.losses(examples, with_language=False)
    assert nothing is None
    assert alone.item() == pytest.approx(task_loss.item(), rel=1e-6)


@pytest.mark.parametrize("part_tokens", [1, 20, 2048])  # an example at a time, some, all
def test_a_step_is_that_of_a_hand_written_loop(
    part_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune_network, "PART_TOKENS", part_tokens)
    values = data(training=texts(6))
    options = {"epochs": 1, "batch_size": 6, "aux_weight": 0.5, "warmup_share": 0.0, **NO_DROPOUT}
    result = run(tmp_path / "out", values, **options)
    gpt = network()
    torch.manual_seed(0)
    model = FineTuned(with_new_tokens(gpt, FineTuneConfig(**NO_DROPOUT), (DELIMITER, EXTRACT)), values, 0.0)
    theirs = reference("pre", tmp_path, model)
    head = model.score.weight.detach().clone().requires_grad_()
    total = torch.zeros(())
    for example in values.training:
        ids = torch.tensor(example.rows)
        logits = theirs.transformer(ids)[0][:, -1] @ head.T
        total = total + F.cross_entropy(logits, torch.tensor([example.target])) + 0.5 * theirs(ids, labels=ids).loss
    (total / 6).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    parameters = [*theirs.parameters(), head]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    decayed = [each for each in parameters if each.dim() == 2]
    plain = [each for each in parameters if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999)).step()
    found = dict(result.classifier.gpt.named_parameters())
    compared = 0
    for name, parameter in theirs.transformer.named_parameters():
        # Adam's first step is the sign of a gradient, which rounding decides where the gradient is nearly 0.
        is_certain = parameter.grad.abs() > 1e-5
        compared += int(is_certain.sum())
        torch.testing.assert_close(found[name][is_certain], parameter.data[is_certain], rtol=1e-4, atol=2e-5)
    assert compared > 0.8 * sum(each.numel() for each in theirs.transformer.parameters())
    torch.testing.assert_close(result.classifier.weight.data, head.data, rtol=1e-4, atol=2e-5)


def test_both_orders_of_a_pair_are_added_and_choices_share_a_softmax() -> None:
    hidden = torch.randn(6, 16)
    pair = FineTuned(network(), data("similarity"), 0.0)
    row = ((1,), (2,))
    found = pair.outputs(hidden, [Example(row, 0)] * 3)
    expected = torch.stack([(hidden[n] + hidden[n + 1]) @ pair.score.weight.T for n in (0, 2, 4)])
    torch.testing.assert_close(found, expected)
    choice = FineTuned(network(), data("multiple-choice", labels=("score",), problem_type="regression"), 0.0)
    assert choice.has_classes
    ragged = [Example(((1,), (2,)), 0), Example(((1,), (2,), (3,), (4,)), 3)]
    scores = (hidden @ choice.score.weight.T)[:, 0]
    outputs = choice.outputs(hidden, ragged)
    assert outputs.shape == (2, 4)
    torch.testing.assert_close(outputs[0, :2], scores[:2])
    torch.testing.assert_close(outputs[1], scores[2:])
    assert torch.isneginf(outputs[0, 2:]).all()
    loss, _ = choice.losses(ragged, with_language=False)
    assert torch.isfinite(loss)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert all(torch.isfinite(each.grad).all() for each in choice.parameters() if each.grad is not None)


def test_new_tokens_get_rows_and_the_others_keep_theirs() -> None:
    for gpt in (network(), network(tie_word_embeddings=False), network(vocab_size=30)):
        wider = with_new_tokens(gpt, FineTuneConfig(), (DELIMITER, EXTRACT))
        assert wider.config.vocab_size == max(22, gpt.config.vocab_size)
        torch.testing.assert_close(wider.wte.weight[:20], gpt.wte.weight[:20])
        torch.testing.assert_close(wider.head.weight[:20], gpt.head.weight[:20])
        assert 0.01 < wider.wte.weight[20:22].std() < 0.03
        wider.wte.weight.data.zero_()
        assert gpt.wte.weight.abs().max() > 0, "the caller's network stays as it was"


def test_it_learns_and_writes_what_is_read_again(tmp_path: Path) -> None:
    seen: list[Progress] = []
    notes: list[str] = []
    values = data(training=texts(200), held_out=texts(50, seed=1))
    result = run(
        tmp_path / "out", values, epochs=6, dropout=0.0, on_progress=seen.append, on_note=notes.append, batch_size=16
    )
    assert [(each.done, each.total) for each in seen] == [(step, 78) for step in range(1, 79)]
    assert len(notes) == 6
    assert [each.step for each in result.losses.held_out] == [13, 26, 39, 52, 65, 78]
    assert result.losses.best.metric > 0.9 > values.baseline
    assert not (tmp_path / "out.training").exists()
    again = load_network(tmp_path / "out")
    ids = torch.tensor(values.held_out[0].rows)
    with torch.no_grad():
        torch.testing.assert_close(again(ids), result.classifier(ids))
    assert not any(each.requires_grad for each in result.classifier.parameters())


@pytest.mark.parametrize("aux_weight", [0.5, 0.0])
def test_an_interrupted_training_resumes_to_the_same_weights(tmp_path: Path, aux_weight: float) -> None:
    options: dict[str, Any] = {"aux_weight": aux_weight, "save_every": 2, "evaluate_every": 2, "patience": 0}
    whole = run(tmp_path / "whole", data(), **options)
    for stop in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", data(), on_progress=interrupt_at(stop), **options)
        assert not (tmp_path / "parts").exists()
    notes: list[str] = []
    parts = run(tmp_path / "parts", data(), on_note=notes.append, **options)
    assert notes[0] == f"resumes at step 4 of 6, as saved in {tmp_path / 'parts.training'}"
    assert parts.losses == whole.losses
    for name, tensor in whole.classifier.state_dict().items():
        assert torch.equal(tensor, parts.classifier.state_dict()[name]), name
    with pytest.raises(FileExistsError):
        run(tmp_path / "parts", data(), **options)


def interrupt_at(step: int) -> Callable[[Progress], None]:
    def interrupt(progress: Progress) -> None:
        if progress.done == step:
            raise KeyboardInterrupt

    return interrupt


def test_a_failed_writing_is_done_again_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.save_classifier", fail)
        with pytest.raises(OSError, match="disk full"):
            run(tmp_path / "out", data())
    (tmp_path / "out").rmdir()
    seen: list[Progress] = []
    run(tmp_path / "out", data(), on_progress=seen.append)
    assert seen == []
    assert load_network(tmp_path / "out")


def test_a_state_of_other_data_or_another_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", data(), save_every=1, on_progress=interrupt_at(2))
    for other in ({"values": data(training=texts(23))}, {"seed": 1}, {"aux_weight": 0.1}):
        with pytest.raises(ModelError, match="another configuration, checkpoint or data"):
            run(tmp_path / "out", **({"values": data()} | other))


def test_it_stops_early_and_writes_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Tensor]] = []

    def scripted(model: FineTuned, *_: Any) -> tuple[float, float]:
        seen.append(copy.deepcopy(model.state_dict()))
        return [1.0, 0.5, 0.6, 0.5, 0.4][len(seen) - 1], 0.0

    monkeypatch.setattr(ortgpt_models.finetune, "measure", scripted)
    notes: list[str] = []
    result = run(tmp_path / "out", data(), epochs=5, evaluate_every=2, patience=2, on_note=notes.append)
    assert [each.loss for each in result.losses.held_out] == [1.0, 0.5, 0.6, 0.5]
    assert (result.steps, result.losses.best.step) == (8, 4)
    assert notes[-1] == "stopped at step 8 of 15: 2 measurements without a lower held-out loss"
    assert torch.equal(result.classifier.weight, seen[1]["score.weight"])
    assert not torch.equal(result.classifier.weight, seen[3]["score.weight"])


def test_a_loss_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"loss became (nan|inf) at step \d+; use a learning rate below"):
        run(tmp_path / "out", data(), learning_rate=1e30, clip_norm=1e30, epochs=5)


def test_the_callers_random_state_stays(tmp_path: Path) -> None:
    gpt, values = network(), data()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(tmp_path / "out", values, gpt, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)


SIZES = ((200, 0), (50, 1))


def test_a_regression_learns_values(tmp_path: Path) -> None:
    training, held_out = (
        tuple(Example(each.rows, 2.5 * each.target - 1.0) for each in texts(count, seed)) for count, seed in SIZES
    )
    values = data(labels=("score",), problem_type="regression", training=training, held_out=held_out)
    result = run(tmp_path / "out", values, epochs=6, batch_size=16, dropout=0.0)
    with torch.no_grad():
        errors = [result.classifier(torch.tensor(each.rows))[0, -1, 0] - each.target for each in held_out]
    metric = torch.stack(errors).abs().mean().item()
    assert result.losses.best.metric == pytest.approx(metric, rel=1e-4)
    assert metric < values.baseline / 2

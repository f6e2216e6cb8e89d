from __future__ import annotations

from typing import Any

import pytest

from ortgpt_models import ModelError
from ortgpt_models.finetune_config import FineTuneConfig
from ortgpt_models.task_data import Example, make_task_data


def rows(labels: list[Any]) -> list[tuple[tuple[tuple[int, ...], ...], Any]]:
    return [(((index,),), label) for index, label in enumerate(labels)]


def make(labels: list[Any], held_out: list[Any] | None = None, task: str = "classification", **options: Any) -> Any:
    measured = None if held_out is None else [(((100 + n,),), label) for n, label in enumerate(held_out)]
    return make_task_data(task, rows(labels), measured, **({"share": 0.25, "seed": 0} | options))


def test_labels_are_numbered_in_order() -> None:
    data = make(["b", "a", "c", "a"], ["c", "a"])
    assert (data.labels, data.problem_type) == (("a", "b", "c"), "single_label_classification")
    assert [each.target for each in data.training] == [1, 0, 2, 0]
    assert [each.target for each in data.held_out] == [2, 0]
    numbers = make([10, 9, -1], [9])
    assert (numbers.labels, [each.target for each in numbers.training]) == (("-1", "9", "10"), [2, 1, 0])


def test_numbers_with_a_fraction_are_a_regression() -> None:
    data = make([1, 2.5, 4.0], [3, 0.5], task="similarity")
    assert (data.labels, data.problem_type, data.has_classes) == (("score",), "regression", False)
    assert [each.target for each in data.training] == [1.0, 2.5, 4.0]
    assert data.baseline == pytest.approx((0.5 + 2.0) / 2)  # the mean is 2.5


def test_the_baseline_is_the_most_frequent_answer_of_the_training_rows() -> None:
    assert make(["a", "b", "b"], ["a", "b", "a", "a"]).baseline == 0.25
    assert make(["b", "a"], ["a", "b", "a", "a"]).baseline == 0.75  # of equally frequent ones the first
    choices = make([2, 0, 2], [2, 1], task="multiple-choice")
    assert (choices.labels, choices.has_classes, choices.baseline) == (("score",), True, 0.5)


def test_a_share_is_held_out_by_the_seed_and_equal_rows_stay_together() -> None:
    data = make(["a", "b"] * 20)
    assert (len(data.training), len(data.held_out)) == (30, 10)
    assert {*data.training} | {*data.held_out} == {Example(((n,),), n % 2) for n in range(40)}
    assert make(["a", "b"] * 20).held_out == data.held_out
    assert make(["a", "b"] * 20, seed=1).held_out != data.held_out
    twice = make_task_data("classification", rows(["a", "b"] * 20) * 2, None, share=0.25, seed=0)
    assert not {each.rows for each in twice.training} & {each.rows for each in twice.held_out}
    assert twice.notes == ("40 of 80 rows repeat another",)


def test_what_is_odd_about_rows_is_told() -> None:
    other = make_task_data("classification", [*rows(["a", "b"]), (((0,),), "b")], rows(["a"]), share=0.1, seed=0)
    assert other.notes == (
        "1 of 3 rows repeat another, 1 of them with other labels",
        "1 of 1 held-out rows are among those to train on, too",
    )


@pytest.mark.parametrize(
    ("labels", "held_out", "reason"),
    [
        (["a", "a"], None, "all 2 rows have the label 'a'"),
        ([1, "a"], None, "the labels are integers and texts"),
        ([1.5, "a"], None, "the labels are numbers and texts"),
        ([0.5, 0.5], None, "all 2 rows have the value 0.5"),
        (list(range(1001)), None, "there are 1,001 labels"),
        (["a", "b"], ["c"], "the held-out rows have the label 'c'"),
        ([0, 1], [True], "the held-out rows have the label True"),
        ([0.5, 1], ["a"], "the held-out rows have the label 'a', and those to train on have numbers"),
    ],
)
def test_labels_that_cannot_be_learnt_are_refused(labels: list[Any], held_out: list[Any] | None, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        make(labels, held_out)


def test_too_few_rows_to_hold_some_out_are_refused() -> None:
    with pytest.raises(ModelError, match="2 rows, 1 of them different, are too few"):
        make_task_data("classification", [(((1,),), "a"), (((1,),), "b")], None, share=0.1, seed=0)


def test_the_digest_is_of_all_that_decides() -> None:
    digests = {make(["a", "b"] * 4).sha256, make(["a", "b"] * 4, seed=1).sha256, make(["a", "c"] * 4).sha256}
    assert len(digests) == 3
    assert make(["a", "b"] * 4).sha256 in digests


def test_the_learning_rate_rises_and_falls_in_lines() -> None:
    config = FineTuneConfig(learning_rate=1.0, warmup_share=0.2)
    assert [config.learning_rate_at(step, 10) for step in range(10)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    )
    assert FineTuneConfig(learning_rate=1.0).learning_rate_at(0, 10) == 1.0
    assert (config.steps_per_epoch(64), config.steps_per_epoch(65)) == (2, 3)
    with pytest.raises(ModelError, match=r"epochs = 0 .*; head_dropout = 1\.0 "):
        FineTuneConfig(epochs=0, head_dropout=1.0)


def test_labels_without_a_row_to_train_on_are_told() -> None:
    data = make([*["a"] * 10, *["b"] * 10, "c"], share=0.9, seed=1)
    missing = sorted({0, 1, 2} - {each.target for each in data.training})
    assert missing == [2]
    assert data.notes == ("labels of which every row is held out, so that none is trained on: c",)
    with pytest.raises(ModelError, match=r"without the rows held out, all have the label '[ab]'; add rows, hold"):
        make(["a", "b"], share=0.5)

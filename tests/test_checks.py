"""What a check says: the rank, the first wrong element, the shape, and the mistake that looks like that."""

import numpy as np
import pytest
import torch

from course_lib.checks import WrongAnswer, require, same

ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    "got, wanted",
    [
        (ONES, ONES.clone()),
        (ONES + 1e-7, ONES),
        (np.ones((2, 3)), ONES),
        ([1, 2], (1, 2)),
        (range(2), [0, 1]),
        ({"a": 1.0}, {"a": 1.0 + 1e-9}),
        (torch.tensor(2.0), 2.0),
        (3, 3),
        ("x", "x"),
        (None, None),
        (True, True),
    ],
)
def test_equal_things_are_equal(got, wanted, capsys):
    same(got, wanted, "it")
    assert capsys.readouterr().out == "right: it\n"


@pytest.mark.parametrize(
    "got, wanted, words",
    [
        (None, ONES, "None, where tensor"),
        (ONES[0], ONES, r"shape \(3,\), expected \(2, 3\)"),
        ([1.0], ONES, "a list, where a tensor of shape"),
        (ONES + torch.eye(2, 3), ONES, r"element \[0, 0\] is 2, expected 1, and 1 more of 6 differ"),
        (ONES * float("nan"), ONES, "is nan, expected 1"),
        ([1, 2], [1, 2, 3], "a list of 2"),
        ([1, 5], [1, 2], "number 1 is 5, expected 2"),
        ([[1], [2, 4]], [[1], [2, 3]], "number 1, number 1 is 4, expected 3"),
        ([ONES, ONES * 2], [ONES, ONES], r"number 1, element \[0, 0\] is 2, expected 1"),
        ([ONES[0]], [ONES], r"number 0, shape \(3,\), expected"),
        ([ONES[0, 0]], [ONES[0, 0] * 2], "number 0 is 1, expected 2"),
        (7, [1], "an int, where a list of 1 is expected"),
        ({"a": 1}, {"b": 1}, "'b' is missing"),
        ({"a": 1, "b": 2}, {"a": 1}, "'b' is not expected"),
        (1.5, 2.5, "1.5, expected 2.5"),
        (1.0, 1, r"1 \(a float\), expected 1 \(an int\)"),
        (ONES, 1.0, r"a tensor of shape \(2, 3\), where 1 is expected"),
        (ONES[0, 0], "x", "a tensor of shape"),
        ("a", "b", "'a', expected 'b'"),
    ],
)
def test_what_differs_is_named(got, wanted, words):
    with pytest.raises(WrongAnswer, match=f"^it: .*{words}"):
        same(got, wanted, "it")


def test_the_rank_and_the_mistake_are_named():
    mistakes = {"a sum: divide it": [ONES, ONES * 2], "something else": [ONES, ONES * 3]}
    with pytest.raises(
        WrongAnswer, match=r"^it: rank 1: element \[0, 0\] is 2, expected 1, .*\. This is a sum: divide it$"
    ):
        same([ONES, ONES * 2], [ONES, ONES], "it", ranks=True, mistakes=mistakes)


def test_a_question_ends_with_one_mark():
    with pytest.raises(WrongAnswer, match=r"^it: None, .*; is there a return\? This is nothing$"):
        same(None, 1, "it", mistakes={"nothing": None})


def test_require_says_why(capsys):
    require(True, "it", "")
    with pytest.raises(WrongAnswer, match="^it: because$"):
        require(False, "it", "because")
    assert capsys.readouterr().out == "right: it\n"

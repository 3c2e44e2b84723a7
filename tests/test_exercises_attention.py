"The checkers of chapter 00 accept right answers however they are written, and say what is wrong with the others."

import math

import numpy as np
import pytest
import torch

from coupled_qk.attention import rotary
from coupled_qk.exercises.attention import check_previous, check_softmax, check_window


# -- exercise 1


def softmax_by_loops(scores):
    rows = []
    for row in scores.tolist():
        exps = [math.exp(s - max(row)) for s in row]
        rows.append([e / sum(exps) for e in exps])
    return rows


def softmax_in_place(scores):
    scores -= scores.amax(-1, keepdim=True)
    e = scores.exp()
    return e / e.sum(-1, keepdim=True)


SOFTMAX_RIGHT = {
    "row maximum": lambda s: softmax_in_place(s.clone()),
    "log-sum-exp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "loops": softmax_by_loops,
    "array": lambda s: np.array(softmax_by_loops(s)),
    "module": torch.nn.Softmax(-1),
    "single precision": lambda s: s.float().softmax(-1),
}
SOFTMAX_WRONG = {
    "naive": (lambda s: s.exp() / s.exp().sum(-1, keepdim=True), "overflows"),
    "maximum of the matrix": (lambda s: (s - s.max()).exp() / (s - s.max()).exp().sum(-1, keepdim=True), "ROW's own"),
    "mean of the row": (lambda s: (e := (s - s.mean(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True), "ROW's own"),
    "columns": (lambda s: s.softmax(-2), "COLUMNS"),
    "whole matrix": (lambda s: s.flatten().softmax(-1).view(s.shape), "TOGETHER"),
    "not divided": (lambda s: (s - s.amax(-1, keepdim=True)).exp(), "sums to"),
    "clamped": (lambda s: s.clamp(max=80).softmax(-1), "the softmax gives"),
    "no exponential": (lambda s: s.abs() / s.abs().sum(-1, keepdim=True), "the softmax gives"),
    "in place": (softmax_in_place, "changed the tensor"),
    "transposed": (lambda s: s.softmax(-1).T, "shape"),
}

# -- exercise 2


def window_by_loops(T, w):
    return [[j <= i and i - j < w for j in range(T)] for i in range(T)]


WINDOW_RIGHT = {
    "positions": lambda T, w: (d := torch.arange(T)[:, None] - torch.arange(T)).ge(0) & d.lt(w),
    "triangles": lambda T, w: torch.ones(T, T, dtype=torch.bool).tril().triu(1 - w),
    "loops": window_by_loops,
    "array": lambda T, w: np.array(window_by_loops(T, w)),
}
WINDOW_WRONG = {
    "one too many": (lambda T, w: torch.ones(T, T, dtype=torch.bool).tril().triu(-w), "itself included"),
    "not itself": (lambda T, w: torch.ones(T, T, dtype=torch.bool).tril(-1).triu(-w), "itself included"),
    "no window": (lambda T, w: torch.ones(T, T, dtype=torch.bool).tril(), "itself included"),
    "both sides": (lambda T, w: torch.ones(T, T, dtype=torch.bool).tril(w - 1).triu(1 - w), "future"),
    "upside down": (lambda T, w: ~torch.tensor(window_by_loops(T, w)), "upside down"),
    "turned": (lambda T, w: torch.tensor(window_by_loops(T, w)).T, "rows belong to queries"),
    "numbers": (lambda T, w: torch.tensor(window_by_loops(T, w)).float(), "True and False"),
    "one row": (lambda T, w: torch.ones(T, dtype=torch.bool), "shape"),
}

# -- exercise 3

RIGHT_PAIR = torch.tensor([[4.0, 0.0], [4 * math.cos(1), 4 * math.sin(1)]])
PREVIOUS_RIGHT = {
    "key by hand": lambda: ([4.0, 0.0], [4 * math.cos(1), 4 * math.sin(1)]),
    "query turned back": lambda: (rotary(torch.tensor([[0.0, 5.0]]), -1)[0], torch.tensor([0.0, 5.0])),
    "one tensor": lambda: RIGHT_PAIR,
    "with gradient": lambda: RIGHT_PAIR.clone().requires_grad_(),
    "a long key": lambda: (RIGHT_PAIR[0].numpy() / 10, RIGHT_PAIR[1].numpy() * 20),
}
PREVIOUS_WRONG = {
    "equal": (lambda: (RIGHT_PAIR[0], RIGHT_PAIR[0]), "itself"),
    "wrong way": (lambda: (RIGHT_PAIR[0], RIGHT_PAIR[1] * torch.tensor([1, -1])), "AHEAD"),
    "swapped": (lambda: (RIGHT_PAIR[1], RIGHT_PAIR[0]), "AHEAD"),
    "too short": (lambda: RIGHT_PAIR / 4, "longer"),
    "opposite": (lambda: (RIGHT_PAIR[0], -RIGHT_PAIR[1]), "prefers"),
    "two radians": (lambda: (RIGHT_PAIR[0], rotary(RIGHT_PAIR[:1], 2)[0]), "prefers"),
    "degrees": (lambda: (RIGHT_PAIR[0], [4 * math.cos(math.radians(1)), 4 * math.sin(math.radians(1))]), "itself"),
    "zero": (lambda: torch.zeros(2, 2), "zero"),
    "for all tokens": (lambda: (RIGHT_PAIR[0].expand(6, 2), RIGHT_PAIR[1].expand(6, 2)), "shape"),
    "only one": (lambda: RIGHT_PAIR[0], "shape"),
    "nan": (lambda: RIGHT_PAIR * math.nan, "nan"),
    "endless": (lambda: RIGHT_PAIR.double() * 1e200, "so long"),
}

RIGHT = [
    (c, a)
    for c, d in ((check_softmax, SOFTMAX_RIGHT), (check_window, WINDOW_RIGHT), (check_previous, PREVIOUS_RIGHT))
    for a in d.items()
]
WRONG = [
    (c, a)
    for c, d in ((check_softmax, SOFTMAX_WRONG), (check_window, WINDOW_WRONG), (check_previous, PREVIOUS_WRONG))
    for a in d.items()
]
name = lambda x: x.__name__ if callable(x) else x[0]


@pytest.mark.parametrize("check,answer", RIGHT, ids=name)
def test_right(check, answer, capsys):
    assert check(answer[1]) is True
    assert capsys.readouterr().out.startswith("Right: ")


@pytest.mark.parametrize("check,answer", WRONG, ids=name)
def test_wrong(check, answer, capsys):
    wrong, words = answer[1]
    assert check(wrong) is False
    said = capsys.readouterr().out
    assert said.startswith("Not yet: ") and words in said

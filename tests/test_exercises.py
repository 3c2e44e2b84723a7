"Every checker, whatever the learner hands over, answers in words: it never raises, and never calls nonsense right."

import math, sys
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import torch

from coupled_qk import exercises
from coupled_qk.exercises.verdict import answered, as_tensor, call

MODULES = [import_module(f"coupled_qk.exercises.{m.name}") for m in iter_modules(exercises.__path__)]
CHECKERS = [getattr(m, name) for m in MODULES for name in m.__all__ if name.startswith("check_")]


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("not even that")


def stops(error):
    def answer(*args):
        raise error

    return answer


def returns(value):
    return lambda *args: value


def changes(*args):
    "A function that spoils what it was given, and hands it back."
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg.zero_()
    return args[0] if args else None


async def later(*args):
    return 1.0


loop: list = []
loop.append(loop)
giant = torch.zeros(1).expand(10**6, 10**6)  # no memory behind it, unless somebody copies it
VALUES = {
    "None": None,
    "nothing in a list": [None, None],
    "text": "softmax",
    "names": [["a", "b"], ["c", "d"]],
    "a dictionary": {"k": 1},
    "a set": {1.0, 2.0},
    "a generator": (x for x in (1.0, 2.0)),
    "a function": math.exp,
    "a class": dict,
    "a list in itself": loop,
    "ragged": [[1.0], [1.0, 2.0]],
    "complex": torch.ones(2, 2, dtype=torch.cfloat),
    "one complex number": 1j,
    "objects": np.array([object()]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "empty": torch.empty(0),
    "an empty list": [],
    "without values": torch.ones(2, 2, device="meta"),
    "one without value": torch.ones((), device="meta"),
    "sparse": torch.ones(2, 2).to_sparse(),
    "sparse and huge": torch.sparse_coo_tensor([[0], [0]], [1.0], (10**6, 10**6), check_invariants=True),
    "huge": giant,
    "many axes": torch.ones([1] * 20),
    "nan": math.nan,
    "infinity": math.inf,
    "too long for a float": 10**400,
    "a word for nan": "nan",
}
FUNCTIONS = {
    "raises": stops(KeyError("oops")),
    "asserts": stops(AssertionError()),
    "exits": sys.exit,
    "exits with words": stops(SystemExit("bye")),
    "ends a generator": stops(GeneratorExit()),
    "stops an iteration": stops(StopIteration()),
    "raises what has no words": stops(Mute()),
    "raises two lines": stops(ValueError("one\ntwo")),
    "calls itself": lambda *args: FUNCTIONS["calls itself"](*args),
    "takes nine arguments": lambda a, b, c, d, e, f, g, h, i: a,
    "a class": dict,
    "a module": torch.nn.Linear(2, 2),
    "changes its input": changes,
    "returns its arguments": lambda *args: args,
    **{f"returns {name}": returns(value) for name, value in VALUES.items()},
}


def said(capsys, check, answer):
    "The verdict, and its line."
    right = check(answer)
    out = capsys.readouterr().out
    assert out.startswith("Right: " if right else "Not yet: ") and out.count("\n") == 1 and len(out) < 500
    return right, out


@pytest.mark.parametrize("check", CHECKERS, ids=lambda c: c.__name__)
class TestEveryChecker:
    def test_no_function(self, capsys, check):
        for answer in (None, 3.0, torch.eye(2), "softmax", [1.0, 2.0]):
            right, words = said(capsys, check, answer)
            assert not right and "needs your function" in words

    def test_nonsense(self, capsys, check):
        for name, answer in FUNCTIONS.items():
            assert not said(capsys, check, answer)[0], name

    def test_later(self, capsys, check):
        with pytest.warns(RuntimeWarning, match="never awaited"):
            assert not said(capsys, check, later)[0]

    @pytest.mark.parametrize("fill", [0.0, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf, True])
    def test_one_number_everywhere(self, capsys, check, fill):
        "In many shapes; in that of the input; in that of a square of its size."
        for shape in ((), (1,), (2,), (1, 2), (2, 2), (4, 2), (8, 2), (3, 5), (6, 6)):
            assert not said(capsys, check, returns(np.full(shape, fill)))[0]
        size = lambda x: x.shape if isinstance(x, torch.Tensor) else (int(x),) * 2
        assert not said(capsys, check, lambda *args: np.full(size(args[0] if args else 2), fill))[0]

    def test_print(self, capsys, check):
        "What the learner prints to find out comes before the verdict."
        assert check(lambda *args: print("here")) is False
        *before, last = capsys.readouterr().out.splitlines()
        assert set(before) == {"here"} and last.startswith("Not yet: ")

    def test_interrupt(self, check):
        "Only the learner's own interrupt passes."
        with pytest.raises(KeyboardInterrupt):
            check(stops(KeyboardInterrupt()))


RIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
SAME = {
    "itself": RIGHT,
    "single precision": RIGHT.float(),
    "half precision": RIGHT.half(),
    "whole numbers": RIGHT.int(),
    "with gradient": RIGHT.clone().requires_grad_(),
    "a parameter": torch.nn.Parameter(RIGHT.clone()),
    "turned twice": RIGHT.T.contiguous().T,
    "sparse": RIGHT.to_sparse(),
    "an array": RIGHT.numpy(),
    "an array backwards": RIGHT.flip(0).numpy()[::-1],
    "an array for reading": np.broadcast_to(RIGHT.numpy(), (1, 2, 2))[0],
    "lists": RIGHT.tolist(),
    "a tuple of tensors": tuple(RIGHT),
    "a list of arrays": list(RIGHT.numpy()),
    "a mixture": [[np.float32(1), 2], torch.tensor([3, 4])],
    "a list of ranges": [range(1, 3), range(3, 5)],
}


@pytest.mark.parametrize("name", SAME)
def test_same_numbers(name):
    t, problem = as_tensor(SAME[name], (2, 2))
    assert problem is None and torch.equal(t, RIGHT) and t.dtype == torch.float64 and not t.requires_grad


def test_copy():
    "What was read stays as it was when the learner's own tensor changes afterwards."
    for mine in (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool), np.ones(2)):
        t, _ = as_tensor(mine, (2,), dtype=torch.bool if mine.dtype == torch.bool else torch.float64)
        mine[:] = 0
        assert t.all()


@pytest.mark.parametrize(
    "value", [2, 2.0, True + 1, np.float32(2), np.array([2.0]), torch.tensor(2), [[2]], 2 * 10**30]
)
def test_one_number(value):
    t, problem = as_tensor(value, ())
    assert problem is None and t.shape == () and t.item() in (2.0, 2e30)


def test_truth_stays_truth():
    for value in (torch.tensor([True, False]), [True, False], np.array([True, False]), [np.True_, False]):
        t, problem = as_tensor(value, (2,), dtype=torch.bool)
        assert problem is None and t.dtype == torch.bool and t.tolist() == [True, False]
        assert as_tensor(value, (2,))[0].tolist() == [1.0, 0.0]
    assert "True and False" in as_tensor([1, 0], (2,), dtype=torch.bool)[1]


@pytest.mark.parametrize(
    "value, words",
    [
        (torch.ones(3, 2), ["the keys must be a tensor of shape (2, 3)", "(3, 2)", "transposed"]),
        (torch.ones(2, 3) * 1j, ["(2, 3)", "complex"]),
        ("many", ["type str"]),
        (torch.full((2, 3), math.nan), ["nan or infinity"]),
        (giant, ["(1000000, 1000000)"]),
    ],
)
def test_words(value, words):
    t, problem = as_tensor(value, (2, 3), "the keys")
    assert all(word in problem for word in words), problem
    assert t.tolist() == [[0.0] * 3] * 2  # something to go on with


def test_infinite_on_request():
    assert as_tensor([math.inf, 1.0], (2,), finite=False)[1] is None
    assert "yours is nan" in as_tensor(math.nan, ())[1]


def test_call():
    x = torch.ones(2)
    assert call(lambda a, b: a + b, x, 1)[0].tolist() == [2, 2]
    assert answered(lambda a: a, (x,), (2,))[1] is None
    for spoil in (torch.Tensor.zero_, lambda a: a.resize_(3), lambda a: a.add_(1).sum()):
        assert "changed the tensor" in call(spoil, x)[1] and x.tolist() == [1, 1]
    assert call(stops(Mute()))[1] == "your function stopped with Mute"
    assert call(stops(ValueError("one\n  two")))[1] == "your function stopped with ValueError (one two)"

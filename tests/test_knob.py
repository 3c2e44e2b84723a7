"The made text: its words, its grammar, its rate, and the floor that no model can be below."

import itertools
import math
from collections import Counter

import pytest

from coupled_qk.data import ByteTokenizer, ngram_bits
from coupled_qk.knob import floor_bits, knob_text, letters, make_domain, sentences, word_bits


def test_domains_share_no_word_and_differ_in_grammar():
    made = [make_domain(i) for i in range(len(letters))]
    words = [w for d in made for group in d.words for w in group]
    assert len(set(words)) == len(words) == 8 * 48 and all(len(w) == 4 for w in words)
    assert all(w[0] == letters[i] for i, d in enumerate(made) for group in d.words for w in group)
    assert len({str(d.grammar) for d in made}) == 8
    assert all(sorted(map(len, d.grammar)) == [4, 5, 6] and all(f.count(3) == 1 for f in d.grammar) for d in made)
    assert make_domain(3) == make_domain(3)


def test_a_text_is_the_same_everywhere():
    "Python's own generator, seeded by text, gives the same on every machine: a stored study depends on it."
    assert knob_text(4, 0.2, 60) == "detu didu dosa diso dunu duve.\ndibi danu deru detu.\ndeko duvu deru detu.\n"
    assert knob_text(4, 0.2, 5000, seed=1) != knob_text(4, 0.2, 5000, seed=2)


def test_a_topic_stays_until_the_text_moves_on():
    known, last, topic = [make_domain(i) for i in range(4)], None, None
    for i, said in itertools.islice(sentences(4, 0.3), 500):
        row = said.removesuffix(".\n").split()
        form = next(f for f in known[i].grammar if len(f) == len(row))
        assert all(w in known[i].words[c] for w, c in zip(row, form, strict=True) if c != 3)
        said_topic = row[form.index(3)]
        assert i != last or said_topic == topic
        last, topic = i, said_topic


@pytest.mark.parametrize(("k", "r"), [(2, 0.1), (5, 0.5), (8, 1.0)])
def test_the_rate_and_the_shares(k, r):
    drawn = [i for i, _ in itertools.islice(sentences(k, r, seed=2), 20_000)]
    moves = sum(a != b for a, b in itertools.pairwise(drawn)) / 19_999
    assert moves == pytest.approx(r, abs=0.015)
    assert all(n / 20_000 == pytest.approx(1 / k, abs=0.04) for n in Counter(drawn).values())


def surprise(k, r, n):
    "Bits per byte that an oracle pays, which knows the rules and reads them off the text."
    share = [1 / n / sum(1 / m for m in range(1, 17)) for n in range(1, 17)]
    known = [make_domain(i) for i in range(k)]
    p = {w: x for d in known for group in d.words for w, x in zip(group, share, strict=True)}
    bits, size, last = 0.0, 0, None
    for i, said in itertools.islice(sentences(k, r, seed=9), n):
        row = said[:-2].split()
        form = next(f for f in known[i].grammar if len(f) == len(row))
        moved = math.log2(r / (k - 1) * p[row[form.index(3)]]) if i != last else math.log2(1 - r)
        bits -= moved + math.log2(1 / 3) + sum(math.log2(p[w]) for w, c in zip(row, form, strict=True) if c != 3)
        size, last = size + len(said), i
    return bits / size


@pytest.mark.parametrize(("k", "r"), [(2, 0.02), (2, 0.5), (8, 0.02), (8, 0.5), (4, 1.0)])
def test_the_floor_is_what_an_oracle_pays(k, r):
    assert surprise(k, r, 20_000) == pytest.approx(floor_bits(k, r), abs=0.006)


def test_the_floor_by_hand():
    bits = 1 + 0.5 * (math.log2(7) + word_bits) + math.log2(3) + 4 * word_bits  # r = 1/2: one bit says whether
    assert floor_bits(8, 0.5) == pytest.approx(bits / 26)
    assert floor_bits(2, 1.0) == pytest.approx((5 * word_bits + math.log2(3)) / 26)  # nothing to know of the past


def test_counting_is_above_the_floor_and_further_the_more_coherent_the_text():
    encode = ByteTokenizer().encode
    excess = []
    for r in (0.02, 0.5, 1.0):
        grams = ngram_bits(encode(knob_text(4, r, 200_000, 0)), encode(knob_text(4, r, 20_000, 1)))
        excess.append(grams - floor_bits(4, r))
    assert excess == sorted(excess, reverse=True) and excess[-1] > 0


@pytest.mark.parametrize(("k", "r"), [(1, 0.5), (9, 0.5), (2, 0.0), (2, 1.1), (2, -1.0), (2, math.nan)])
def test_knobs_that_do_not_turn_so_far(k, r):
    for call in (lambda: next(sentences(k, r)), lambda: floor_bits(k, r), lambda: knob_text(k, r, 100)):
        with pytest.raises(ValueError, match="k must be from 2 to 8 and r above 0 and at most 1, got"):
            call()


@pytest.mark.parametrize("i", [-1, 8])
def test_domains_that_are_not_there(i):
    with pytest.raises(ValueError, match="i must be from 0 to 7, got"):
        make_domain(i)

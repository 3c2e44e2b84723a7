"The measures of coherence on texts whose numbers are known, and the stored result beside the survey that it repeats."

import math
import random

import pytest

from coupled_qk.coherence import burstiness, coherence, gzip_bits, held_out_xz, main, unseen, word_entropy, words
from coupled_qk.compare import stored_result
from coupled_qk.corpora import domains, matched_domains

NAMES = [*domains, *(f"mix{k}" for k in matched_domains)]


def test_words():
    assert words("Don't stop; the dog's 3 o'clock 'tea' __x__") == [
        "don't",
        "stop",
        "the",
        "dog's",
        "o'clock",
        "tea",
        "x",
    ]
    assert words("1, 2!") == []


@pytest.mark.parametrize("n", [1, 2, 16, 1000])
def test_word_entropy_of_equal_shares(n):
    assert word_entropy([str(i) for i in range(n)] * 3) == pytest.approx(math.log2(n))


def test_word_entropy_of_a_skewed_text():
    p = [0.5, 0.25, 0.125, 0.125]
    text = ["a"] * 4 + ["b"] * 2 + ["c", "d"]
    assert word_entropy(text) == pytest.approx(-sum(x * math.log2(x) for x in p))


def test_unseen():
    assert unseen(["a", "b"], ["a", "b", "c", "c"]) == 0.5 and unseen([], ["a"]) == 1.0


def test_compression():
    letters = "".join(random.Random(0).choices([chr(c) for c in range(48, 112)], k=50_000))  # 64: six bits each
    assert gzip_bits(letters) == pytest.approx(6, abs=0.15) and gzip_bits("a" * 50_000) < 0.02
    assert held_out_xz(letters, letters[:10_000]) < 0.1  # seen before, from afar
    assert held_out_xz(letters[:40_000], letters[40_000:]) > 5.9


@pytest.mark.parametrize("k", [2, 4, 16])
def test_burstiness_of_words_with_windows_of_their_own(k):
    "The window tells log2(k) bits; a shuffled window misses them by the bias of an entropy from 200 draws."
    text = [str(i) for i in range(k) for _ in range(200)] * 30
    assert burstiness(text) == pytest.approx(math.log2(k) - (k - 1) / (400 * math.log(2)), abs=0.01)


def test_burstiness_of_chance_and_of_a_circle():
    text = random.Random(1).choices([str(i) for i in range(500)], k=100_000)
    assert abs(burstiness(text)) < 0.02
    assert burstiness([str(i) for i in range(200)] * 100) < -0.5  # each word once in each window: less than chance


def test_burstiness_grows_with_the_share_of_bursts():
    def text(share):
        rng = random.Random(2)
        windows = ([str(rng.randrange(100))] * 200 for _ in range(200))
        return [w if rng.random() < share else str(rng.randrange(100)) for window in windows for w in window]

    found = [burstiness(text(share)) for share in (0.0, 0.2, 0.5, 0.9)]
    assert found == sorted(found) and found[0] < 0.05 < 3 < found[-1]


def test_burstiness_leaves_out_the_rest_and_depends_on_the_window():
    text = ["a"] * 40 + ["b"] * 40
    assert burstiness(text, 40) == burstiness([*text, *"xyz"], 40) or abs(burstiness([*text, *"xyz"], 40) - 1) < 0.1
    assert burstiness(text, 80 // 4) == pytest.approx(1, abs=0.15)
    assert burstiness(text, 40, seed=3) == burstiness(text, 40, seed=3)


def test_all_measures_of_a_text():
    pieces = ["the crab dug a hole. " * 150, "the hen ran and ran. " * 150]
    found = coherence(pieces, ["the owl sat. " * 10])
    assert (
        found["words"] == 5 * 300 + 30 and found["distinct"] == 10 and found["unseen"] == pytest.approx(2 / 3, abs=1e-3)
    )
    assert found["burstiness"] > 0.5


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: word_entropy([]), "text must hold at least one word"),
        (lambda: unseen(["a"], []), "valid must hold at least one word"),
        (lambda: gzip_bits(""), "text must hold at least one character"),
        (lambda: held_out_xz("a", ""), "valid must hold at least one character"),
        (lambda: burstiness(["a"] * 399), "two windows of 200 words, got 399 words"),
    ],
)
def test_nothing_to_measure(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_the_command_writes_a_result(tmp_path, monkeypatch, capsys):
    from coupled_qk import coherence as module

    sides = ["the crab dug a hole.\n" * 200], ["the hen ran.\n" * 30]
    monkeypatch.setattr(module, "sample", lambda names, n, seed: sides)
    assert main([str(tmp_path / "a.json"), "--names", "kjv", *matched_domains[4], "--bytes", "1000"]) == 0
    import json

    result = json.loads((tmp_path / "a.json").read_text())
    assert list(result["corpora"]) == ["kjv", *matched_domains[4], "mix4"]  # a mixture only where all its parts are
    assert result["n_bytes"] == 1000 and result["environment"]["commit"]


# ---- the stored result

SURVEY = {  # a first look, by another reader of the packages: words, word entropy, gzip, held-out xz, 6-gram, new %, bursts
    "wikitext2": (374_609, 10.66, 3.08, 2.29, 2.12, 6.3, 0.28),
    "pubmed": (342_510, 10.73, 2.82, 1.99, 2.06, 6.5, 0.36),
    "gcide": (404_877, 10.34, 2.99, 2.24, 2.20, 8.2, 0.21),
    "recipes": (391_823, 9.04, 2.59, 1.64, 1.46, 1.1, 0.29),
    "imdb": (426_979, 10.06, 3.25, 2.39, 2.10, 3.4, 0.14),
    "dialogue": (450_292, 9.53, 3.06, 2.30, 2.04, 3.2, 0.15),
    "kjv": (457_876, 8.65, 2.58, 1.76, 1.60, 1.3, 0.39),
    "mix8": (392_456, 10.75, 3.15, 2.38, 2.39, 6.5, 0.50),
}
# The survey divided pieces and not documents, so its held-out text is nearer to the training text. It took its text from
# the packages in their order, and does not say where a window begins. Hence the tolerances; `code` was another text.
COLUMNS = ("word_entropy", "gzip_bits", "held_out_xz", "ngram_bits", "unseen", "burstiness")
TOLERANCE = {
    "words": 0.03,  # relative
    "word_entropy": 0.15,
    "gzip_bits": 0.07,
    "held_out_xz": 0.15,
    "ngram_bits": 0.17,
    "unseen": 0.011,
    "burstiness": 0.11,
}


def test_the_stored_result_is_whole():
    stored = stored_result("coherence")
    assert list(stored["corpora"]) == [*domains, "mix4", "mix8"] and stored["n_bytes"] == 2_400_000
    assert stored["environment"]["commit"] and "dirty" not in stored["environment"]["commit"]


@pytest.mark.parametrize("name", SURVEY)
def test_the_stored_result_is_near_the_survey(name):
    found, (n, *others) = stored_result("coherence")["corpora"][name], SURVEY[name]
    assert found["words"] == pytest.approx(n, rel=TOLERANCE["words"])
    for column, value in zip(COLUMNS, others, strict=True):
        value = value / 100 if column == "unseen" else value
        assert found[column] == pytest.approx(value, abs=TOLERANCE[column]), column


def test_code_is_another_text_than_the_survey_s():
    "The survey measured Python's own library, of 11,476 words; ours is one library, which repeats itself more."
    code = stored_result("coherence")["corpora"]["code"]
    assert code["distinct"] < 11_476 and code["held_out_xz"] < 1.62 - 0.15
    rows = stored_result("coherence")["corpora"]
    assert max(rows, key=lambda name: rows[name]["burstiness"]) == "code"  # in both

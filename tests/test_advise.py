"What a text is told rests on rows, on likeness and on nothing else: made-up rows and made-up texts, no result."

import json
import math

import pytest

from coupled_qk import advise as module
from coupled_qk import claims, guidelines
from coupled_qk import study as studying
from coupled_qk.advise import (
    advise,
    couple,
    decide,
    distance,
    leave,
    measure,
    measures,
    neighbours,
    no_gain,
    reach,
    references,
    row_for,
    rows_about,
    single,
    unsure,
    weigh,
)
from coupled_qk.claims import Finding, answer
from coupled_qk.cli import main
from coupled_qk.compare import stored_result
from coupled_qk.corpora import domains, matched_domains
from coupled_qk.knob import knob_text
from coupled_qk.stats import difference, equivalence_p
from coupled_qk.study import studies

SIZES = [2_400_000, 600_000, 150_000]
GAIN, HARM, SMALL, WIDE = (
    (-0.06, -0.05, -0.07, -0.045, -0.055),
    (0.06, 0.05, 0.07, 0.045, 0.055),
    (-0.006, -0.004, -0.008, -0.005, -0.003),
    (-0.05, 0.03, -0.03, -0.045, 0.005),
)


def row(arm, seed, nats):
    facts = {"train": {"steps": 500, "batch_size": 8}, "model": {"context": 256}, "parameters": 664_000}
    return {"arm": arm, "seed": seed, "nats": nats, "perplexity": math.exp(nats), "seconds": 360.0, **facts}


def pairs(arm, base, gaps):
    return [row(name, s, 4 + s + x) for s, g in enumerate(gaps) for name, x in ((arm, g), (base, 0.0))]


@pytest.fixture
def stored(monkeypatch):
    "Made-up rows in place of all studies: stored({study: rows})."

    def use(rows):
        made = lambda name, out=None: {"study": name, "runs": rows.get(name, []), "wanted": 50}
        monkeypatch.setattr(claims, "collect", made)
        monkeypatch.setattr(studying, "collect", made)

    use({})
    return use


def about(name, gaps, n_bytes=10**7):
    "The rows that `row_for` would choose for a text of this size, with these gaps."
    found = row_for(name, n_bytes)
    return {found.study: pairs(found.arm, found.base, gaps)}


@pytest.fixture
def looks_like(monkeypatch):
    "Any path is a text that looks like one of ours: looks_like(numbers or name, bytes)."

    def use(what, n_bytes=10**7, size=2_400_000):
        numbers = {m: references()[size][what][m] for m in measures} if isinstance(what, str) else what
        monkeypatch.setattr(
            module, "measure", lambda path: module.Measured("mine", n_bytes, n_bytes // 9, size, numbers)
        )

    return use


@pytest.mark.parametrize("gaps, word", [(GAIN, couple), (HARM, leave), (SMALL, no_gain), (WIDE, unsure)])
def test_a_row_allows_one_answer(gaps, word):
    assert decide(Finding("", answer(gaps), 5, wanted=5)) == word
    assert decide(Finding("", answer(gaps), 5, wanted=6)) == unsure  # a pair is missing


@pytest.mark.parametrize("verdict", [claims.flat, "not measured yet", "needs a GPU", claims.untold, "whatever"])
def test_an_open_verdict_allows_nothing(verdict):
    assert decide(Finding("", verdict, 5, wanted=5)) == unsure


@pytest.mark.parametrize("gaps, word", [(GAIN, couple), (HARM, leave), (SMALL, no_gain), (WIDE, unsure)])
@pytest.mark.parametrize("name", ["pubmed", "code"])
def test_the_row_of_the_same_text_speaks(stored, looks_like, name, gaps, word):
    stored(about(name, gaps))
    looks_like(name)
    found = advise("mine")
    assert found.answer == word and found.finding.pairs == 5 and found.row.arm == f"euler on {name}"
    assert found.sure == ("not at all" if word == unsure else "weakly")


def test_couple_needs_an_interval_below_zero(stored, looks_like):
    "Whatever pairs say: couple, only where the 95 % interval lies below zero and is not inside the margin."
    looks_like("pubmed")
    for shift in (-0.06, -0.02, -0.005, 0.03):
        for width in (0.002, 0.03):
            gaps = [shift + width * x for x in (-1.2, -0.4, 0.1, 0.5, 1.1)]
            stored(about("pubmed", gaps))
            row, found = difference(gaps), advise("mine")
            assert (found.answer == couple) == (row.high < 0 and not equivalence_p(gaps, claims.margin) < 0.05)
            assert (found.answer == leave) == (row.low > 0 and not equivalence_p(gaps, claims.margin) < 0.05)


def test_nothing_stored_is_unsure(stored, looks_like):
    for name in references()[2_400_000]:
        looks_like(name)
        found = advise("mine")
        assert found.answer == unsure and found.sure == "not at all"
        assert "not measured yet" in found.reason or "mixture" in found.reason


def test_missing_pairs_are_told(stored, looks_like):
    stored(about("pubmed", GAIN[:3]))
    looks_like("pubmed")
    found = advise("mine")
    assert found.answer == unsure and "only 3 of the 5 planned pairs" in found.reason


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["mix4", "mix8"])
def test_a_mixture_is_unsure_whatever_rows_say(stored, looks_like, name, size):
    stored(
        {
            "corpora": [
                r for d in matched_domains[4] for r in about(d, GAIN)["corpora" if d != "wikitext2" else "ablation"]
            ]
        }
    )
    looks_like(name, size=size)
    assert advise("mine").answer == unsure
    numbers, texts = references()[size][name], references()[size]
    assert weigh(numbers, {n: texts[n] for n in single(texts)}, lambda _: couple).answer == unsure  # unlike, too


@pytest.mark.parametrize("name", domains)
def test_another_sample_finds_its_own_text(name):
    texts, again = references()[600_000], stored_result("coherence-600000-again")
    assert again["seed"] != stored_result("coherence-600000")["seed"] and again["n_bytes"] == 600_000
    assert weigh(again["corpora"][name], texts, lambda _: couple).speaker == name


@pytest.mark.parametrize("size", SIZES)
def test_our_texts_left_out_are_no_evidence_yet(size):
    "The chapter says so: of two neighbours, one has no row. Where that changes, the chapter must."
    texts = references()[size]
    for name in single(texts):
        found = weigh(texts[name], {n: x for n, x in texts.items() if n != name}, lambda _: couple)
        assert not (found.speaker and rows_about(name) and rows_about(found.speaker))


TEXTS = {  # in spreads of their own: the singles lie on a line, at 0, 1, 2 and 10
    name: dict.fromkeys(measures, float(x)) for name, x in {"a": 0, "b": 1, "c": 2, "d": 10}.items()
}


def at(x):
    return dict.fromkeys(measures, float(x))


def test_weigh_on_a_line():
    says = {"a": couple, "b": couple, "c": leave, "d": couple}.get
    assert weigh(at(0.05), TEXTS, says)[::2] == (couple, "a")
    assert weigh(at(1.95), TEXTS, says)[::2] == (leave, "c")
    assert weigh(at(0.5), TEXTS, says)[::2] == (couple, "a")  # a and b are as near, and agree
    between = weigh(at(1.5), TEXTS, says)
    assert between[::2] == (unsure, None) and "disagree" in between.reason and "c: do not couple" in between.reason
    assert "unlike" in weigh(at(6), TEXTS, says).reason
    assert weigh(at(0), TEXTS, says).speaker == "a"  # exactly ours


def test_a_mixture_about_as_near_makes_unsure():
    texts = {**TEXTS, "mix4": at(0.4)}
    assert weigh(at(0.15), texts, lambda _: couple)[::2] == (unsure, None)  # 0.15 from a, 0.25 from the mixture
    assert weigh(at(0.1), texts, lambda _: couple).speaker == "a"  # 0.1 and 0.3
    assert weigh(at(0.4), texts, lambda _: couple).reason.startswith("a mixture")


def test_distance_is_a_root_mean_square_in_spreads():
    spread = {m: s for m, s in zip(measures, (1.0, 2.0, 4.0, 0.5), strict=True)}
    other = {m: 3 * s for m, s in spread.items()}
    assert distance(at(0), other, spread) == pytest.approx(3) == distance(other, at(0), spread)
    assert distance(at(0), at(0), spread) == 0


@pytest.mark.parametrize("size", SIZES)
def test_units_do_not_matter(size):
    texts = references()[size]
    scaled = {n: {m: 1000 * x[m] if m == "unseen" else x[m] for m in measures} for n, x in texts.items()}
    for name in texts:
        a, b = neighbours(texts[name], texts), neighbours(scaled[name], scaled)
        assert list(a) == list(b) and list(a.values()) == pytest.approx(list(b.values()))
        assert next(iter(a)) == name and next(iter(a.values())) == 0
    assert reach(texts) == pytest.approx(reach(scaled)) and 0 < reach(texts) < 1


def test_references():
    assert list(references()) == SIZES
    for texts in references().values():
        assert list(texts) == [*domains, "mix4", "mix8"] and all(set(measures) <= set(x) for x in texts.values())


@pytest.mark.parametrize("name", ["coherence", "coherence-600000", "coherence-150000", "coherence-600000-again"])
def test_references_are_of_a_clean_commit(name):
    assert "dirty" not in stored_result(name)["environment"]["commit"]


def test_rows_are_planned_and_of_the_right_size():
    "Every row is a comparison of its study; the row that fits is never of a text more than twice as large."
    for name in domains:
        for r in rows_about(name):
            arms = {run.arm: run for run in studies[r.study]().runs}
            assert arms[r.arm].model.pre == "euler" and arms[r.base].model.pre == "standard"
            assert arms[r.arm].corpus == arms[r.base].corpus and name in arms[r.arm].corpus
        for n in (10**3, 10**5, 3 * 10**5, 10**6, 10**7, 10**9):
            found = row_for(name, n)
            assert (found is None) or found.n_bytes <= 2 * n
    assert bool(rows_about("gcide")) == bool(rows_about("mix4")) == bool(row_for("pubmed", 1000)) == False  # noqa: E712


def write(folder, n_files, n_bytes, seed=0):
    for i in range(n_files):
        (folder / f"{i}.txt").write_text(knob_text(4, 0.1, n_bytes // n_files, seed=seed + i), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("invented"), 20, 180_000)


def test_measure_is_of_our_size(folder):
    found = measure(folder)
    assert found.size == 150_000 and set(found.numbers) == set(measures)
    assert found.n_bytes >= 135_000 and found.n_held >= 15_000 and found == measure(str(folder))
    assert all(math.isfinite(x) for x in found.numbers.values())


def test_an_invented_text_is_unlike_ours(folder, stored):
    stored({})
    found = advise(folder)
    assert found.answer == unsure and "unlike" in found.reason and found.row is None


def test_a_short_text_is_told_what_it_lacks(tmp_path):
    found = advise(write(tmp_path, 5, 30_000))
    assert found.answer == unsure and found.text.size == 0 and not found.distances
    assert "135,000 bytes to train on and 15,000 held out" in found.reason


def test_the_command(folder, capsys, stored):
    assert main(["advise", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert not err and "Advice: unsure\n" in out and "How sure: not at all." in out and "Limits:" in out
    assert all(words in out for words in ("yours", "150,000 of its bytes", "Nearest, in spreads"))
    assert all(len(line) < 400 for line in out.splitlines())


def test_the_command_as_json(folder, capsys, stored):
    assert main(["advise", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "advice" and found["answer"] == unsure and found["evidence"] is None
    assert len(found["distances"]) == 10 and found["text"]["size"] == 150_000 and found["limits"]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_tells_the_row(capsys, stored, looks_like, as_json):
    stored(about("pubmed", GAIN))
    looks_like("pubmed")
    assert main(["advise", "mine", *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    if as_json:
        found = json.loads(out)["evidence"]
        assert found["study"] == "corpora" and found["pairs"] == found["wanted"] == 5
        assert found["command"] == "coupled-qk study corpora" and found["verdict"] == claims.less
        assert "0.7 million weights, 1.0 million tokens" in found["scale"]
    else:
        assert "Advice: couple\n" in out and "How sure: weakly." in out
        assert "95 % interval -0.0" in out and "5 of 5 pairs" in out and "coupled-qk study corpora" in out
        assert "0.7 million weights, 1.0 million tokens read, from 2.0 million bytes" in out


def test_the_command_without_a_row(capsys, stored, looks_like):
    looks_like("pubmed")
    assert main(["advise", "mine"]) == 0
    out = capsys.readouterr().out
    assert "Evidence: none yet. coupled-qk study corpora makes it" in out


@pytest.mark.parametrize("argument", ["--help"])
def test_help(capsys, argument):
    with pytest.raises(SystemExit) as stop:
        main(["advise", argument])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "examples:" in out and "--json" in out and "PATH" in out


def bad(tmp_path, name):
    file = tmp_path / "x.txt"
    contents = {
        "empty": b"",
        "blank": b" \n" * 100_000,
        "short": b"too short\n",
        "latin": "é".encode("latin-1") * 200_000,
        "binary": b"a\0" * 200_000,
        "utf16": "text and more\n".encode("utf-16") * 20_000,
        "digits": b"".join(b"%d\n" % i for i in range(100_000)),
    }
    file.write_bytes(contents[name])
    return file


@pytest.mark.parametrize(
    "name, words",
    [
        ("empty", "more than 4,000 characters"),
        ("blank", "4,000 characters"),
        ("short", "4,000 characters"),
        ("latin", "not UTF-8 text"),
        ("binary", "byte 0"),
        ("utf16", "UTF-8"),
        ("digits", "word"),
    ],
)
def test_bad_files(tmp_path, capsys, name, words):
    assert main(["advise", str(bad(tmp_path, name))]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and words in err, err


@pytest.mark.parametrize(
    "path, words",
    [
        ("no/such/file", "exists"),
        ("pubmedd", "did you mean 'pubmed'"),
        ("", "empty"),
        ("~nosuchuser/x", "there is no user"),
    ],
)
def test_bad_paths(capsys, path, words):
    try:
        code = main(["advise", path])
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and words in capsys.readouterr().err


def test_folders_without_text(tmp_path, capsys):
    assert main(["advise", str(tmp_path)]) == 2
    (tmp_path / "a.bin").write_bytes(b"\0" * 100)
    assert main(["advise", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("at least two different text files") == 2


def test_no_argument(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["advise"])
    assert stop.value.code == 2 and "PATH" in capsys.readouterr().err


class TestGuidelines:
    def test_every_row_is_planned(self):
        "With what is stored now: each line finds its row, and each study's arms exist."
        for line in guidelines.guidelines():
            assert line.find().verdict and line.question.endswith("?") and line.compared
        text = guidelines.summary()
        assert text.startswith("**In one line:** of ")
        assert all(line.compared in text for line in guidelines.guidelines())

    @pytest.mark.parametrize("gaps, word", [(GAIN, couple), (HARM, leave), (SMALL, no_gain), (WIDE, unsure)])
    def test_rows_speak(self, stored, gaps, word):
        stored({"corpora": pairs("euler on pubmed", "standard on pubmed", gaps)})
        assert f"- 2 MB of pubmed: **{word}**." in guidelines.details()
        assert f"**{word}** (2 MB of pubmed)" in guidelines.summary()

    def test_unfinished_rows_are_unsure(self, stored):
        stored({"corpora": pairs("euler on pubmed", "standard on pubmed", GAIN[:4])})
        assert "- 2 MB of pubmed: **unsure**." in guidelines.details() and "4 of 5 pairs" in guidelines.details()

    @pytest.mark.parametrize(
        "change, words", [(-0.05, "gains more where"), (0.05, "gains less where"), (0.0, "no difference that matters")]
    )
    def test_a_gap_of_gaps(self, stored, change, words):
        rows = pairs("euler on all", "standard on all", GAIN)
        stored(
            {
                "scarce": rows
                + pairs("euler on 1/16", "standard on 1/16", [g + change + 1e-4 * i for i, g in enumerate(GAIN)])
            }
        )
        line = next(x for x in guidelines.guidelines() if x.compared.startswith("a sixteenth against"))
        assert words in guidelines.says(line, line.find())

    def test_nothing_stored(self, stored, monkeypatch):
        monkeypatch.setattr(guidelines, "stored_result", missing)
        asked = {guidelines.says(line, line.find()) for line in guidelines.guidelines()}
        assert asked <= {"not measured yet", "not measured"}

    def test_latency(self, monkeypatch):
        arms = {"standard": {"seconds": [1.0, 2.0, 4.0]}, "euler": {"seconds": [1.2, 2.4, 4.8]}}
        monkeypatch.setattr(guidelines, "stored_result", lambda name: {"arms": arms})
        found = guidelines.slower("euler")
        assert found.verdict == "20% slower" and found.ours.startswith("1.20 times") and found.pairs == 3
        assert guidelines.slower("leapfrog") == guidelines.missing
        arms["euler"]["seconds"] = [0.9, 1.8, 3.6]
        assert guidelines.slower("euler").verdict == "at most 5 % slower"

    def test_adapters(self, monkeypatch):
        def rows(gaps):
            made = [
                {"way": way, "seed": s, "new": 3 + s + x} for s, g in enumerate(gaps) for way, x in (("a", g), ("b", 0))
            ]
            search = [{"way": "a", "seed": 100, "new": 0.0}, {"way": "b", "seed": 4, "diverged": "loss"}]
            monkeypatch.setattr(
                guidelines, "stored_result", lambda name: {"plan": {"seeds": [0, 1, 2, 3, 4]}, "rows": made + search}
            )
            return guidelines.adapted("a", "b")

        assert rows(GAIN).verdict == claims.less and rows(GAIN).pairs == 5
        assert decide(rows(GAIN)) == couple and decide(rows(GAIN[:4])) == unsure
        assert rows(GAIN[:1]) == guidelines.missing


def missing(name):
    if name in ("bench", "retrofit"):
        raise FileNotFoundError(name)
    return stored_result(name)

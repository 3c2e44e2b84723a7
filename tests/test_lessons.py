"The lessons keep their contract (CONTRIBUTING.md): frame, length, small cells, visible checks, pictures, exercises."

import re
import statistics
import sys
import tomllib
from importlib import import_module
from types import SimpleNamespace

import pytest
from conftest import ROOT
from fastcore.nbio import read_nb

NBS = ROOT / "nbs"
LESSONS = tomllib.loads((NBS / "lessons.toml").read_text(encoding="utf-8"))["lesson"]
KEPT = [lesson for lesson in LESSONS if not lesson.get("draft")]
CHECK = re.compile(r"^(test_\w+\(|assert )")
BLOCKS = re.compile(r"<details>.*?</details>|```.*?```|\$\$.*?\$\$|^> \*\*[\w ]+\*\*$|^>", re.S | re.M)
INLINE = re.compile(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|<[^>]*>|[#*|\[\]]")


def cells(lesson, kind):
    nb = read_nb(NBS / f"{lesson['name']}.ipynb")
    return [c for c in nb.cells if c.cell_type == kind and not str(c.id).startswith("frame-")]


def words(lesson):
    "Words of prose: without code, maths, link targets, hints, solutions and the quiz."
    text = "\n\n".join(c.source for c in cells(lesson, "markdown") if c.id != "quiz")
    return len(INLINE.sub(" ", BLOCKS.sub(" ", text)).split())


def code_lines(cell):
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in cell.source.splitlines())


@pytest.fixture
def frame(monkeypatch):
    "tools/frame.py as `--check` runs it."
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "argv", ["frame.py", "--check"])
    return import_module("frame")


def test_frames_are_those_of_the_order_file(frame):
    assert frame.main() == 0


ORDER = """[[lesson]]
name = "00_one"
title = "One"
claim = "It is one."
aims = ["count"]
needs = ["fingers"]
seconds = 1
shown = ["one"]
not_shown = ["two"]
references = ["Euclid"]

[[lesson]]
name = "01_two"
title = "Two"
claim = "It is two."
aims = ["count on"]
needs = ["00_one", "another finger"]
seconds = 100
shown = ["two"]
not_shown = ["three"]
references = ["Euclid"]
"""


def order(frame, monkeypatch, folder, text):
    "A folder with this order file and its two notebooks, for frame.py to read."
    (folder / "lessons.toml").write_text(text, encoding="utf-8")
    for name in ("00_one", "01_two"):
        (folder / f"{name}.ipynb").touch()
    monkeypatch.setattr(frame, "CFG", SimpleNamespace(nbs_path=folder))


def test_order_file(frame, monkeypatch, tmp_path):
    order(frame, monkeypatch, tmp_path, ORDER)
    assert [frame.label(x) for x in frame.lessons()] == ["00 One", "01 Two"]
    assert "**You need** chapter [00 One](00_one.ipynb), and another finger." in frame.header(1, frame.lessons())
    assert "about 2 minutes" in frame.header(1, frame.lessons())


BROKEN = {
    "no TOML": ('title = "Two"', "title = Two", "not TOML", "line 14"),
    "no lessons": (ORDER, "draft = true", "[[lesson]]"),
    "one lesson, not a list": (ORDER, "[lesson]", "[[lesson]]"),
    "a key is missing": ('claim = "It is two."', "", "lesson 01_two", "'claim' is missing"),
    "the name is missing": ('name = "01_two"', "", "lesson number 2", "'name' is missing"),
    "a key nobody reads": ("seconds = 100", "seconds = 100\nminutes = 2", "lesson 01_two", "'minutes'"),
    "seconds in words": ("seconds = 100", 'seconds = "100"', "lesson 01_two", "'seconds'", "a whole number", "'100'"),
    "one aim, not a list": ('["count on"]', '"count on"', "lesson 01_two", "'aims'", "a list of texts"),
    "no aim": ('["count on"]', "[]", "lesson 01_two", "'aims'", "[]"),
    "twice": ('name = "01_two"', 'name = "00_one"', "lesson 00_one", "'name'", "twice"),
    "no notebook": ('name = "01_two"', 'name = "01_too"', "lesson 01_too", "'name'", "nbs/01_too.ipynb"),
    "needs what is not there": ('"00_one", ', '"00_won", ', "lesson 01_two", "'needs'", "00_won"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_order_file(frame, monkeypatch, tmp_path, case):
    "One sentence that names the lesson and the key."
    old, new, *words = BROKEN[case]
    assert ORDER.count(old) == 1
    order(frame, monkeypatch, tmp_path, ORDER.replace(old, new))
    said = frame.main()
    assert said.startswith("nbs/lessons.toml cannot be used: ") and "\n" not in said
    assert all(word in said for word in words), said


def test_every_chapter_is_in_the_order_file():
    assert [lesson["name"] for lesson in LESSONS] == sorted(p.stem for p in NBS.glob("[0-9][0-9]_*.ipynb"))


def test_anchors_of_the_notation_page():
    "Every link to a term leads to an anchor that exists."
    page = "\n".join(c.source for c in read_nb(NBS / "notation.ipynb").cells)
    known = set(re.findall(r'<a id="([^"]+)">', page))
    for lesson in LESSONS:
        text = "\n".join(c.source for c in cells(lesson, "markdown"))
        assert set(re.findall(r"notation\.ipynb#([\w-]+)", text)) <= known, lesson["name"]


FINISHED = [NBS / f"{lesson['name']}.ipynb" for lesson in KEPT]


@pytest.mark.parametrize("path", [*FINISHED, *sorted(NBS.glob("appendix/*.ipynb"))], ids=lambda p: p.stem)
def test_no_cell_is_long(path):
    "In the appendix, too: whoever reads it is no better at long cells."
    assert [c.id for c in read_nb(path).cells if c.cell_type == "code" and code_lines(c) > 40] == []


@pytest.mark.parametrize("lesson", KEPT, ids=lambda x: x["name"])
class TestContract:
    def test_aims(self, lesson):
        assert 3 <= len(lesson["aims"]) <= 5 and lesson["needs"] and lesson["shown"] and lesson["not_shown"]
        assert lesson["references"]

    def test_words(self, lesson):
        assert 1200 <= words(lesson) <= 2500

    def test_cells_are_small(self, lesson):
        lines = [code_lines(c) for c in cells(lesson, "code")]
        assert statistics.median(lines) <= 7 and sum(n < 20 for n in lines) >= 0.9 * len(lines)

    def test_prose_before_anything_new(self, lesson):
        "Never more than four code cells in a row without a word between them."
        nb = read_nb(NBS / f"{lesson['name']}.ipynb")
        kinds = "".join(c.cell_type[0] for c in nb.cells if not str(c.id).startswith("frame-"))
        assert "ccccc" not in kinds

    def test_checks_are_visible(self, lesson):
        assert sum(bool(CHECK.match(line)) for c in cells(lesson, "code") for line in c.source.splitlines()) >= 6

    def test_imports_are_shown(self, lesson):
        hidden = [c.id for c in cells(lesson, "code") if re.match(r"#\| export\n(import|from) ", c.source)]
        assert hidden == [], "a reader who copies the cells of the page needs them: write #| exports"

    def test_predictions(self, lesson):
        assert sum("**Before you read on:**" in c.source for c in cells(lesson, "markdown")) >= 2

    def test_pictures(self, lesson):
        "A picture within the first cells, each with words, and one that moves; light."
        outputs = [o.get("data", {}) for c in cells(lesson, "code") for o in c.outputs]
        stills = [d for d in outputs if "image/png" in d]
        moving = ["".join(d["text/html"]) for d in outputs if "qk-animation" in "".join(d.get("text/html", ""))]
        assert len(stills) + len(moving) >= 4 and len(moving) >= 1
        assert all(len(html) < 155_000 and 'alt="' in html for html in moving)  # 150 KB of frames and the player

    def test_first_picture_comes_early(self, lesson):
        seen = 0
        for c in cells(lesson, "code"):
            plain = re.sub(r"^#.*\n?", "", c.source, flags=re.M).strip()
            if not plain or re.match(r"(import|from) ", plain):
                continue
            seen += 1
            if any("image/png" in o.get("data", {}) or "qk-anim" in str(o.get("data")) for o in c.outputs):
                break
        assert seen <= 4  # the third cell that does something, or a helper more

    def test_exercises(self, lesson):
        nb = cells(lesson, "markdown")
        text = "\n".join(c.source for c in nb)
        assert len(re.findall(r"^### Exercise \d", text, re.M)) == 3
        assert text.count("<summary>Hint</summary>") == text.count("<summary>Solution</summary>") == 3
        stubs = [c for c in cells(lesson, "code") if re.search(r"^check_\w+\(", c.source, re.M)]
        assert len(stubs) == 3 and all("Not yet:" in str(c.outputs) for c in stubs)

    def test_live_control(self, lesson):
        live = [c for c in cells(lesson, "code") if "interact(" in c.source]
        assert live and all("#| eval: false" in c.source for c in live)

    def test_voices(self, lesson):
        text = "\n".join(c.source for c in cells(lesson, "markdown"))
        assert "> **We chose**" in text or "> **We measured**" in text
        assert ":::" not in text  # Jupyter, GitHub and Colab would show it raw

    def test_size(self, lesson):
        assert (NBS / f"{lesson['name']}.ipynb").stat().st_size < 500_000

"""The quiz at the end of each chapter: five questions in one cell, whose answers open to their feedback in Jupyter, on
GitHub and on the page; there a script (_quarto.yml) marks what was opened and counts first tries."""

import re
from collections import Counter
from typing import NamedTuple

import pytest
from conftest import CI, SITE, missing_for_site
from fastcore.nbio import read_nb
from test_lessons import KEPT, NBS
from test_notebooks import solutions

QUESTION = re.compile(r"^\*\*(\d)\. (.+)\*\*$", re.M)
ANSWER = re.compile(r"<details><summary><b>(\w)</b> (.+)</summary>\n\n\*\*(Right|Not so)\.\*\* (.+)\n\n</details>")
REFERENCE = re.compile(r" See \*(.+?)\*\.?$")  # the section to read again


class Answer(NamedTuple):
    letter: str
    text: str
    right: bool
    feedback: str


def notebook(lesson):
    return read_nb(NBS / f"{lesson['name']}.ipynb")


def quiz(lesson):
    "The text of a chapter's quiz."
    return next(c.source for c in notebook(lesson).cells if c.id == "quiz")


def questions(lesson):
    "The answers of each question."
    parts = QUESTION.split(quiz(lesson))[3::3]  # what follows each question
    return [[Answer(a, text, said == "Right", why) for a, text, said, why in ANSWER.findall(part)] for part in parts]


def right_letters(lesson):
    return [a.letter for answers in questions(lesson) for a in answers if a.right]


@pytest.mark.parametrize("lesson", KEPT, ids=lambda x: x["name"])
class TestQuiz:
    def test_place(self, lesson):
        "The chapter's last cell before its footer."
        cells = notebook(lesson).cells
        assert [(c.id, c.cell_type) for c in cells[-2:]] == [("quiz", "markdown"), ("frame-footer", "markdown")]
        assert [c.id for c in cells].count("quiz") == 1

    def test_form(self, lesson):
        "A heading, a sentence or two on how to use it, five questions with their answers, and nothing that is neither."
        assert [n for n, _ in QUESTION.findall(quiz(lesson))] == list("12345")
        rest = ANSWER.sub("", QUESTION.sub("", quiz(lesson))).split("\n\n")
        assert [bool(text.strip()) for text in rest].count(True) == 2 and rest[0] == "## Quiz"

    def test_answers(self, lesson):
        "Three or four that differ, exactly one of them right, each with feedback in a sentence."
        for answers in questions(lesson):
            assert len(answers) in (3, 4) and [a.letter for a in answers] == list("abcd"[: len(answers)])
            assert [a.right for a in answers].count(True) == 1
            assert len({a.text.casefold() for a in answers}) == len(answers)
            assert all(len(REFERENCE.sub("", a.feedback).split()) >= 5 for a in answers)

    def test_summaries_are_plain(self, lesson):
        "Jupyter and GitHub show what stands in a summary as it is."
        for a in (a for answers in questions(lesson) for a in answers):
            assert not re.search(r"[*_`$\[\]\\]", a.text), a.text
            assert set(re.findall(r"</?(\w+)", a.text)) <= {"code", "sub", "sup"}, a.text

    def test_references(self, lesson):
        "Each wrong answer leads to a section of this chapter."
        text = "\n".join(c.source for c in notebook(lesson).cells if c.cell_type == "markdown")
        heads = set(re.findall(r"^##+ (.+)$", text, re.M))
        for a in (a for answers in questions(lesson) for a in answers if not a.right):
            assert (found := REFERENCE.search(a.feedback)), a.feedback
            assert found[1] in heads, f"no section is called {found[1]!r}"

    def test_right_letter_varies(self, lesson):
        assert max(Counter(right_letters(lesson)).values()) <= 2

    def test_no_answer_is_taken_for_a_solution(self, lesson):
        assert "```" not in quiz(lesson) and len(solutions(notebook(lesson))) == 3


def test_right_answers_cannot_be_guessed():
    "Over the course neither a letter nor the longest answer gives the right one away."
    letters = Counter(letter for lesson in KEPT for letter in right_letters(lesson))
    assert max(letters.values()) <= 0.45 * letters.total()
    longest = [
        len(a.text) > max(len(b.text) for b in answers if b != a)
        for lesson in KEPT
        for answers in questions(lesson)
        for a in answers
        if a.right
    ]
    assert sum(longest) <= 0.5 * len(longest)


LESSON = KEPT[0]
SCORE = "{} of 5 right at the first try"


@pytest.fixture
def opened(page, base):
    "The first chapter's page, and its answers with whether each is right."
    page.goto(f"{base}/{LESSON['name'][3:]}.html", wait_until="load")
    page.locator("#quiz [role=status]").wait_for(state="attached")  # the script has run
    answers = [a for some in questions(LESSON) for a in some]
    found = page.locator("#quiz details")
    assert found.count() == len(answers) >= 15
    yield page, [(found.nth(i), a) for i, a in enumerate(answers)]
    assert page.errors == []


def feedback(details):
    return details.locator("p").first


def contrast(page, locator):
    "Between a text and the page behind it (WCAG 2.2)."

    def light(colour):
        parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
        parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    behind = page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")
    a, b = light(locator.evaluate("e => getComputedStyle(e).color")), light(behind)
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@pytest.mark.skipif(bool(missing_for_site()) and not CI, reason=f"needs {missing_for_site()}")
class TestInThePage:
    def test_wrong_then_right(self, opened):
        "What is opened shows its feedback and is marked by a word; only the first answer to a question counts."
        page, answers = opened
        status, wrong = page.locator("#quiz [role=status]"), next(d for d, a in answers if not a.right)
        assert not feedback(wrong).is_visible() and status.inner_text() == ""
        wrong.locator("summary").click()
        wrong.locator(".verdict", has_text="not so").wait_for()
        assert feedback(wrong).is_visible()
        assert SCORE.format(0) in status.inner_text()
        right = [d for d, a in answers if a.right]
        for n, details in enumerate(right):  # the first comes too late, the others count
            details.locator("summary").click()
            details.locator(".verdict", has_text="right").wait_for()
            assert feedback(details).is_visible() and SCORE.format(n) in status.inner_text()
        assert status.inner_text() == SCORE.format(4) + "."

    def test_start_again(self, opened):
        page, answers = opened
        again = page.get_by_role("button", name="Start again")
        assert not again.is_visible()
        for details, _ in answers[:4]:
            details.locator("summary").click()
        page.locator("#quiz .verdict").nth(3).wait_for()
        again.click()
        assert page.locator("#quiz :is(details[open], .verdict, .right, .wrong)").count() == 0
        assert page.locator("#quiz [role=status]").inner_text() == "" and not again.is_visible()
        details = next(d for d, a in answers if a.right)
        details.locator("summary").click()
        details.locator(".verdict").wait_for()
        assert SCORE.format(1) in page.locator("#quiz [role=status]").inner_text()

    def test_keyboard(self, opened):
        "Tab leads from answer to answer and to the button; Enter opens and presses."
        page, answers = opened
        answers[0][0].locator("summary").focus()
        for details, _ in answers[:2]:
            assert details.locator("summary").evaluate("e => e === document.activeElement")
            page.keyboard.press("Enter")
            details.locator(".verdict").wait_for()
            assert feedback(details).is_visible()
            page.keyboard.press("Tab")
            while page.evaluate("document.activeElement.matches('#quiz a')"):  # to the section to read again
                page.keyboard.press("Tab")
        again = page.get_by_role("button", name="Start again")
        again.focus()
        page.keyboard.press("Enter")
        assert page.locator("#quiz details[open]").count() == 0
        assert answers[0][0].locator("summary").evaluate("e => e === document.activeElement")

    def test_way_back(self, opened):
        "The section that a wrong answer names is a link to it."
        page, answers = opened
        details, answer = next((d, a) for d, a in answers if not a.right)
        details.locator("summary").click()
        details.locator("a").click()
        head = page.locator("main :is(h2, h3)", has_text=REFERENCE.search(answer.feedback)[1])
        page.wait_for_function("e => Math.abs(e.getBoundingClientRect().top) < 300", arg=head.element_handle())

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    def test_marks_can_be_read(self, opened, dark):
        page, answers = opened
        if dark:
            page.locator(".quarto-color-scheme-toggle").first.click()
            page.wait_for_function("document.documentElement.classList.contains('quarto-dark')")
        for right in (True, False):
            details = next(d for d, a in answers if a.right is right)
            details.locator("summary").click()
            details.locator(".verdict").wait_for()
            assert contrast(page, details.locator(".verdict")) >= 4.5
        assert contrast(page, page.get_by_role("button", name="Start again")) >= 4.5

    def test_without_script(self, new_page, base):
        page = new_page(java_script_enabled=False)
        page.goto(f"{base}/{LESSON['name'][3:]}.html")
        details = page.locator("#quiz details").first
        details.locator("summary").click()
        assert feedback(details).is_visible() and page.locator("#quiz [role=status]").count() == 0

    def test_every_chapter(self):
        for lesson in KEPT:
            text = (SITE / f"{lesson['name'][3:]}.html").read_text("utf-8")
            section = text.partition('<section id="quiz"')[2].partition("</section>")[0]
            assert section.count("<details") == sum(map(len, questions(lesson))) >= 15, lesson["name"]

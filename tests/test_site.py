"The built site in a real browser: whole, offline, searchable, dark when asked, and no wider than a telephone, where what is too wide scrolls in its box."

import html, re, subprocess, sys, tomllib

import pytest
from conftest import CI, ROOT, SITE, missing_for_site

PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
pytestmark = pytest.mark.skipif(bool(missing_for_site()) and not CI, reason=f"needs {missing_for_site()}")


def test_can_run():
    "In continuous integration nothing here may be skipped in silence."
    assert not missing_for_site()


@pytest.mark.parametrize("path", PAGES)
def test_page(page, base, path):
    "No error, no request to elsewhere, all maths rendered, every picture there and described; no sideways scroll."
    page.goto(f"{base}/{path}", wait_until="networkidle")
    assert page.outside == [] and page.errors == []
    assert page.locator("span.math").count() == page.locator("span.math:has(.katex)").count()
    assert page.locator(".katex-error").count() == 0
    images = page.locator("main img").evaluate_all("all => all.map(i => [i.src.slice(0, 80), i.alt, i.naturalWidth])")
    assert [i for i in images if not (i[1] and i[2])] == [], "a picture without alt text or without content"
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        wide = page.evaluate(
            "w => document.documentElement.scrollWidth <= w ? [] : [...document.querySelectorAll('body *')]"
            ".filter(e => e.getBoundingClientRect().right > w + 1).slice(0, 5).map(e => e.outerHTML.slice(0, 120))",
            width,
        )
        assert wide == [], f"wider than {width} px"
    page.evaluate(
        "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )  # the page's observer
    scrolls = page.locator("main *").evaluate_all(
        "all => all.map(e => [e, getComputedStyle(e)]).filter(([e, s]) => /auto|scroll/.test(s.overflowX) && "
        "e.scrollWidth > e.clientWidth).map(([e, s]) => [e.tabIndex, s.backgroundImage, e.outerHTML.slice(0, 120)])"
    )
    cells = page.locator("main td").evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
    assert set(cells) <= {"rgba(0, 0, 0, 0)"}, "a cell hides the shadow"
    assert [s for s in scrolls if s[0] != 0 or "gradient" not in s[1]] == [], "scrolls, with no hint or out of reach"


def test_links(page, base):
    "Every link to a page or a section of the site has its target."
    ids, hrefs = {}, set()
    for path in PAGES:
        page.goto(f"{base}/{path}")
        ids[path] = set(page.locator("[id]").evaluate_all("all => all.map(e => e.id)"))
        hrefs |= set(page.locator("a[href]").evaluate_all("all => all.map(a => a.href)"))
    local = {h.removeprefix(base + "/") for h in hrefs if h.startswith(base)}
    parts = [(path or "index.html", anchor) for path, _, anchor in (h.partition("#") for h in local)]
    dead = [(p, a) for p, a in parts if not (SITE / p).is_file() or a and p in ids and a not in ids[p]]
    assert dead == []


def finished():
    "The name and the page of each lesson that is no draft."
    for lesson in tomllib.loads((ROOT / "nbs/lessons.toml").read_text("utf-8"))["lesson"]:
        if not lesson.get("draft"):
            yield lesson["name"], (SITE / f"{lesson['name'][3:]}.html").read_text("utf-8")


def test_voices_are_boxes():
    "Each quotation that opens with the name of a voice is a callout on the page."
    for name, text in finished():
        notebook = (ROOT / f"nbs/{name}.ipynb").read_text("utf-8")
        for voice in ("The paper says", "We chose", "We measured"):
            boxes = len(re.findall(rf"callout-title-container[^>]*>\s*(?:<[^>]*>)*{voice}<", text))
            lines = re.findall(rf'(?<!\\)"> \*\*{voice}\*\*', notebook)  # of cells and outputs, not within code
            assert boxes == len(lines), (name, voice)


def test_code_of_a_lesson_can_be_copied():
    "Every name that a lesson's page uses is made on that page; only private helpers may be hidden."
    for name, text in finished():
        blocks = re.findall(r'<pre class="sourceCode python[^"]*cell-code"><code[^>]*>(.*?)</code>', text, re.S)
        code = "\n".join(html.unescape(re.sub(r"<[^>]*>", "", block)) for block in blocks)
        ruff = [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--isolated",
            "--select",
            "F821",
            "--output-format",
            "concise",
            "-",
        ]
        said = subprocess.run(ruff, input=code, capture_output=True, text=True).stdout
        assert len(blocks) > 20 and re.findall(r"F821 Undefined name `([^_`]+)`", said) == [], name


def test_neighbours(page, base):
    "From the first page, `next` leads to the course map and on to the first chapter, and `previous` back."
    page.goto(f"{base}/index.html")
    for name in ("course", "attention"):
        page.locator(".nav-page-next a").click()
        page.wait_for_url(f"**/{name}.html")
    for name in ("course", "index"):
        page.locator(".nav-page-previous a").click()
        page.wait_for_url(f"**/{name}.html")


def test_search(page, base):
    page.goto(f"{base}/index.html")
    page.locator(".smalldocs-search input").first.fill("causal")
    page.locator(".smalldocs-search-results.show a.search-result").first.click()
    page.wait_for_url(lambda url: "/index.html" not in url)
    assert page.locator("main", has_text="causal").count()


def test_dark(page, base):
    "The toggle turns the page dark, figures stay on white, the choice is kept, and the search icon can be seen."
    page.goto(f"{base}/attention.html")
    page.locator(".quarto-color-scheme-toggle").first.click()
    page.wait_for_function("document.documentElement.classList.contains('quarto-dark')")
    colour = "e => getComputedStyle(e).%s"
    figure = page.locator(".cell-output-display img").first
    assert figure.evaluate(colour % "backgroundColor") == "rgb(255, 255, 255)"
    box = page.locator(".smalldocs-search").first
    assert box.locator(".bi-search").evaluate(colour % "color") != box.locator("input").evaluate(
        colour % "backgroundColor"
    )
    page.goto(f"{base}/index.html")
    page.wait_for_function("document.documentElement.classList.contains('quarto-dark')")

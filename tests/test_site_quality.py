"""The built site, quality by quality: open to all readers, light and quick, moving only when asked, at home under any address,
on paper, and whole beside the pages: notebooks to download, the API reference, Markdown copies."""

import ast, html, json, re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import axe_playwright_python
import pytest
from conftest import CI, ROOT, SITE, missing_for_site

PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
CHAPTERS = sorted(p.stem for p in (ROOT / "nbs").glob("[0-9][0-9]_*.ipynb"))
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(bool(missing_for_site()) and not CI, reason=f"needs {missing_for_site()}")


def complaints(page, options=""):
    "What axe-core finds on the page, as rule, element and advice."
    found = page.evaluate(f"axe.run(document, {{resultTypes: ['violations'] {options}}})")["violations"]
    return [(v["id"], n["html"][:200], n["failureSummary"][:300]) for v in found for n in v["nodes"][:3]]


@pytest.mark.parametrize("path", PAGES)
def test_accessible(new_page, base, path):
    "axe-core finds nothing to complain of: contrast, names, headings, landmarks, keyboard. In dark, colours are asked again."
    page = new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")  # no colour half-way to another
    page.goto(f"{base}/{path}", wait_until="networkidle")
    page.evaluate(AXE)
    assert complaints(page) == []
    page.evaluate("window.smalldocsToggleScheme()")
    page.wait_for_function("document.documentElement.classList.contains('quarto-dark')")
    assert complaints(page, ", runOnly: ['color-contrast', 'link-in-text-block']") == []


@pytest.mark.parametrize("path", PAGES)
def test_light_and_quick(page, base, path):
    "All that a page loads is under 2 MB; within 2 seconds its text, its maths and its buttons are ready (best of three loads)."
    sizes, times = [], []
    page.on("response", lambda r: sizes.append(len(r.body())) if r.request.method == "GET" and r.ok else None)
    while len(times) < 3 and min(times, default=9) > 2:
        sizes.clear()
        page.goto(f"{base}/{path}", wait_until="load")
        times.append(page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd") / 1000)
    page.wait_for_load_state("networkidle")
    assert min(times) < 2, times
    assert sum(sizes) < 2_000_000, sizes


MOVING = "document.getAnimations().filter(a => a.playState === 'running').length"


def test_motion_is_a_wish(new_page, base):
    "The first page's picture moves, and stands still for who prefers that; no player starts by itself."
    for wish, moves in (("no-preference", True), ("reduce", False)):
        page = new_page(reduced_motion=wish)
        page.goto(f"{base}/images/idea.svg")
        assert bool(page.evaluate(MOVING)) == moves
    for chapter in CHAPTERS:
        page.goto(f"{base}/{chapter[3:]}.html", wait_until="networkidle")
        still = page.locator(".qk-animation img").evaluate_all("all => all.map(i => i.src)")
        page.wait_for_timeout(600)  # a frame stands for 400 ms
        assert still and still == page.locator(".qk-animation img").evaluate_all("all => all.map(i => i.src)")
        assert page.evaluate(MOVING) == 0


def test_the_idea_is_in_the_first_screen(new_page, base):
    "On a wide screen and on a telephone the moving picture is seen at once, or its beginning is."
    for width, height, seen in ((1280, 800, 1.0), (390, 844, 0.5)):
        page = new_page(viewport={"width": width, "height": height})
        page.goto(f"{base}/index.html", wait_until="networkidle")
        box = page.locator("img[src='images/idea.svg']").bounding_box()
        assert box["y"] + seen * box["height"] <= height, (width, box)


@pytest.fixture(scope="module")
def below(tmp_path_factory):
    "The site as project pages have it: not at the top of its host."
    top = tmp_path_factory.mktemp("host")
    (top / "coupled_qk").symlink_to(SITE)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(top))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/coupled_qk"
        server.shutdown()


def test_below_a_path(browser, below):
    "Every request stays below the path and finds its file; search works there too."
    page, failed = browser.new_page(), []
    page.on(
        "response", lambda r: None if r.status < 400 and r.url.startswith(below) else failed.append((r.status, r.url))
    )
    for path in ("index.html", "attention.html", "playground.html", "api/attention.html", "appendix/files.html"):
        page.goto(f"{below}/{path}", wait_until="networkidle")
        assert page.locator("h1").count() == 1 and page.locator(".navbar-brand").first.is_visible()
        if path.startswith("appendix"):  # one level down
            page.locator(".smalldocs-search input").first.fill("rotary")
            page.locator(".smalldocs-search-results.show a.search-result").first.click()
            page.wait_for_url(lambda url: "#" in url)
    page.close()
    assert failed == []


def test_print(new_page, base):
    "On paper a page is its text: no bars and no buttons, folded solutions open, nothing cut at the right."
    page = new_page(viewport={"width": 720, "height": 1000})  # A4 at 96 dots per inch, less its margins
    page.goto(f"{base}/attention.html", wait_until="networkidle")
    page.emulate_media(media="print")
    for gone in ("#quarto-header", "#quarto-sidebar", ".page-navigation", ".code-copy-button", ".qk-animation input"):
        assert not page.locator(gone).first.is_visible(), gone
    assert page.locator("details pre").first.is_visible()
    wide = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => e.getClientRects().length && "
        "e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.katex')).map(e => e.outerHTML.slice(0, 120))"
    )
    assert wide == []
    assert page.pdf(format="A4").startswith(b"%PDF")


TERMS = {
    "00_attention": ("causal mask", "rotary", "softmax"),
    "01_coupling": ("score terms", "gauge", "displacement"),
    "02_integrators": ("leapfrog", "symplectic", "volume"),
    "03_collapse": ("rank collapse", "spectral gap", "sink"),
    "04_gpt": ("cache", "generate", "SwiGLU"),
    "05_data": ("byte pair", "tokenizer", "batches"),
    "06_training": ("checkpoint", "learning rate", "resume"),
    "07_language_modelling": ("equivalence", "paired", "Holm"),
    "08_corpora": ("coherence", "dilution", "scarce"),
    "09_recall": ("associative recall", "plateau", "filler"),
    "10_scoring": ("differential", "QK-norm", "affine"),
    "11_downstream": ("pooling", "GLUE", "Matthews"),
    "12_cost": ("FLOPs", "memory-bound", "compile"),
    "13_retrofit": ("LoRA", "adapter", "couple"),
    "14_when_to_couple": ("decision", "advise", "unsure"),
}


def test_every_chapter_has_its_terms():
    assert sorted(TERMS) == CHAPTERS


def test_search_finds_each_chapter(page, base):
    "Each chapter is among the results for its key terms."
    page.goto(f"{base}/index.html", wait_until="networkidle")
    box = page.locator(".smalldocs-search input").first
    missed = []
    for chapter, terms in TERMS.items():
        for term in terms:
            box.fill("")
            page.locator(".smalldocs-search-results.show").wait_for(state="hidden")  # those of the term before
            box.fill(term)
            page.locator(".smalldocs-search-results.show a.search-result").first.wait_for()
            hrefs = page.locator("a.search-result").evaluate_all("all => all.map(a => a.href)")
            if not any(f"/{chapter[3:]}.html" in h for h in hrefs):
                missed.append((chapter, term))
    assert missed == []


def test_search_shows_no_tex():
    "No entry holds a formula of its page as it was typed."
    entries, raw = json.loads((SITE / "search.json").read_text("utf-8")), []
    for path in PAGES:
        typed = re.findall(r'<span class="math \w+">\\[(\[](.*?)\\[)\]]</span>', (SITE / path).read_text("utf-8"), re.S)
        formulas = {html.unescape(f).strip() for f in typed if "\\" in f}
        raw += [(e["href"], f) for e in entries if e["href"].split("#")[0] == path for f in formulas if f in e["text"]]
    assert raw == []


def test_notebooks_to_download(page, base):
    "Each page with code offers its notebook, and what comes is the notebook; each chapter opens in Colab."
    for source in sorted((ROOT / "nbs").rglob("*.ipynb")):
        name = source.relative_to(ROOT / "nbs")
        if all(c["cell_type"] == "markdown" for c in json.loads(source.read_text("utf-8"))["cells"]):
            continue
        text = (SITE / name.with_name(re.sub(r"^\d\d_", "", name.stem) + ".html")).read_text("utf-8")
        href = re.search(r'<a href="([^"]+\.ipynb)" download', text)[1]
        assert ((SITE / name).parent / href).resolve().read_bytes() == source.read_bytes()
        assert (
            name.stem not in CHAPTERS
            or f"colab.research.google.com/github/coupled-qk/coupled_qk/blob/main/nbs/{name}" in text
        )


def test_reference():
    "The API reference has each public name of each module, with a source line that is right, and leads to its lesson and back."
    for file in sorted((ROOT / "coupled_qk").glob("[a-z]*.py")):
        text, source = (SITE / f"api/{file.stem}.html").read_text("utf-8"), file.read_text("utf-8")
        lines = source.splitlines()
        names = next(
            n.value for n in ast.parse(source).body if isinstance(n, ast.Assign) and n.targets[0].id == "__all__"
        )
        for name in ast.literal_eval(names):
            assert f'id="{name}"' in text, (file.stem, name)
            line = re.search(rf'id="{name}".*?{file.stem}\.py#L(\d+)', text, re.S)[1]
            assert re.search(rf"\b{name}\b|import", lines[int(line) - 1]), (file.stem, name)
    for chapter in CHAPTERS:
        text = (SITE / f"{chapter[3:]}.html").read_text("utf-8")
        module = re.search(
            r"^#\| default_exp (\w+)", (ROOT / f"nbs/{chapter}.ipynb").read_text("utf-8").replace('"', "\n"), re.M
        )[1]
        made = ast.parse((ROOT / f"coupled_qk/{module}.py").read_text("utf-8")).body
        for name in (
            n.name for n in made if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")
        ):
            assert f'href="api/{module}.html#{name}"' in text, (chapter, name)
            assert f'href="../{chapter[3:]}.html#{name.lower()}"' in (SITE / f"api/{module}.html").read_text("utf-8")


def test_markdown_copies():
    "llms.txt names every page's Markdown copy, and each is there, with text and without markup of the page."
    listed = re.findall(r"^- \[.+?\]\((\S+?)\): \S", (SITE / "llms.txt").read_text("utf-8"), re.M)
    assert sorted(listed) == [f"{p}.md" for p in PAGES]
    for copy in listed:
        text = (SITE / copy).read_text("utf-8")
        assert text.startswith("# ") and "base64" not in text and "<div class" not in text and len(text) > 100, copy

"The playground: its arithmetic is the library's, and it can be dragged, typed and touched; in light and dark, on a telephone too."

import json, re, subprocess, sys

import numpy as np
import pytest
from conftest import CI, ROOT, missing_for_site
from nbdev.config import get_config

pytestmark = pytest.mark.skipif(bool(missing_for_site()) and not CI, reason=f"needs {missing_for_site()}")
VECTORS = json.loads((ROOT / "tests/play_vectors.json").read_text(encoding="utf-8"))
TERMS = ["query-key", "key-key", "query-force", "key-force"]


def test_vectors_are_the_librarys():
    "What Python and JavaScript share was written by the library as it is now."
    subprocess.run([sys.executable, ROOT / "tools/play_vectors.py", "--check"], check=True)


def test_address():
    "The saved notebook names the live page, where pyproject.toml says that the site is."
    text = (ROOT / "nbs/playground.ipynb").read_text(encoding="utf-8")
    assert f"]({get_config(ROOT).doc_url}playground.html)" in text


def opened(page, base):
    page.goto(f"{base}/playground.html", wait_until="networkidle")
    page.wait_for_selector(".play svg")
    return page


@pytest.fixture
def board(page, base):
    "The playground's page, ready; at the end of each test it must have made no error and no request to elsewhere."
    yield opened(page, base)
    assert page.errors == [] and page.outside == []


def computed(page, body, data):
    "What `body`, a function of `data`, returns, with dynamics.js as D and the forces as F."
    script = """async ([body, data]) => {
      const D = await import(new URL("play/dynamics.js", location.href));
      const F = D.makeForces(await (await fetch("play/toy.json")).json());
      return new Function("D", "F", "data", body)(D, F, data);
    }"""
    return page.evaluate(script, [body, data])


def close(mine, theirs, tolerance):
    np.testing.assert_allclose(np.array(mine), np.array(theirs), rtol=tolerance, atol=tolerance)


def test_dynamics(board):
    "Every integrator with every force ends where the library's does, to rounding; volumes to their finite differences."
    body = """return data.moved.map(c => {
      const step = D.integrators[c.step], f = F[c.force], {q, k} = D.evolve(step, data.q, data.k, f, c.dt, c.n);
      const volume = data.q.map((_, i) => D.volume(step, data.q[i], data.k[i], f, c.dt, c.n));
      return {q, k, displacement: [D.displacement(data.q, q), D.displacement(data.k, k)], volume};
    })"""
    cases = VECTORS["moved"]
    assert len({(c["step"], c["force"]) for c in cases}) == len(cases) == 5 * 7
    for mine, case in zip(computed(board, body, VECTORS), cases, strict=True):
        close(mine["q"], case["moved_q"], 1e-12)
        close(mine["k"], case["moved_k"], 1e-12)
        close(mine["displacement"], case["displacement"], 1e-12)
        close(mine["volume"], case["volume"], 1e-6)


def test_terms_and_weights(board):
    "The four terms of each force, and attention with the causal mask and without, are the library's."
    terms = (
        "return Object.fromEntries(Object.entries(F).map(([name, f]) => [name, D.scoreTerms(data.q, data.k, f, 0.3)]))"
    )
    mine = computed(board, terms, VECTORS)
    assert mine.keys() == VECTORS["terms"].keys()
    for force, named in VECTORS["terms"].items():
        assert list(mine[force]) == list(named) == TERMS
        for name in TERMS:
            close(mine[force][name], named[name], 1e-12)
    weights = "return [true, false].map(causal => D.attentionWeights(data.q, data.k, causal))"
    for mine, causal in zip(computed(board, weights, VECTORS), ("true", "false"), strict=True):
        close(mine, VECTORS["weights"][causal], 1e-12)


def test_every_control_names_what_dynamics_has(board):
    names = "return [Object.keys(D.integrators).sort(), Object.keys(F).sort()]"
    choices = [
        sorted(board.locator(f"select[name={name}] option").evaluate_all("all => all.map(o => o.value)"))
        for name in ("step", "force")
    ]
    assert computed(board, names, None) == choices


# What the page shows


def matrix(page, name):
    "A map as the page shows it."
    texts = page.locator(f'[data-map="{name}"] .number').all_text_contents()
    return np.array([float(t.replace("−", "-")) for t in texts]).reshape(4, 4)


def everything(page):
    names = ["plain", "now", *TERMS, "rest", "sum"]
    return {name: matrix(page, name) for name in names} | {"trails": page.locator(".plane svg > g").first.inner_html()}


def changed(page, act):
    "Which of the page's parts `act` changes."
    before = everything(page)
    act()
    after = everything(page)
    return {name for name in before if np.any(before[name] != after[name])}


def choose(page, **values):
    "Set controls by name, as a reader would."
    for name, value in values.items():
        control = page.locator(f".play [name={name}]")
        if isinstance(value, bool):
            control.set_checked(value)
        elif name in ("step", "force"):
            control.select_option(value)
        else:
            control.fill(str(value))


def handle(page, kind, token):
    return page.locator(f".handle.{kind}").nth(token)


def centre(page, kind, token):
    box = handle(page, kind, token).locator(".shape").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def place(page, kind, token):
    "Where the label says that a handle is."
    return [
        float(x)
        for x in re.findall(r"[-\d.]+", handle(page, kind, token).get_attribute("aria-valuetext").replace("−", "-"))
    ]


def test_first_sight(board):
    "The saved sentence and picture are gone, and the maps are those of the chapter: one Euler step of 0.3 with the spring."
    assert "live page" not in board.locator("main").inner_text() and board.locator("main img").count() == 0
    assert place(board, "q", 0) == [1.0, 0.2] and place(board, "k", 3) == [0.6, 0.7]
    shown = everything(board)
    assert np.all(shown["rest"] == 0)
    close(sum(shown[name] for name in TERMS), shown["sum"], 0.021)  # five rounded numbers
    close(shown["now"].sum(1), np.ones(4), 0.021)


def test_mouse(board):
    "A drag moves one handle, by as much as the mouse, and the maps at once; a click beside the handles moves nothing."
    x, y = centre(board, "q", 0)

    def drag():
        board.mouse.move(x, y)
        board.mouse.down()
        board.mouse.move(x - 60, y - 90, steps=4)
        drag.held = everything(board)
        board.mouse.up()

    assert changed(board, drag) == {"plain", "now", "query-key", "query-force", "key-force", "sum", "trails"}
    assert np.all(drag.held["now"] == matrix(board, "now"))  # already while it was held
    assert centre(board, "q", 0) == pytest.approx((x - 60, y - 90), abs=1.5)
    assert place(board, "k", 0) == [0.9, -0.3] and place(board, "q", 1) == [0.3, 0.9]
    assert changed(board, lambda: board.mouse.move(x, y)) == set()  # let go
    plane = board.locator(".plane svg").bounding_box()
    assert changed(board, lambda: board.mouse.click(plane["x"] + 20, plane["y"] + 20)) == set()


def test_a_handle_stays_in_the_plane(board):
    x, y = centre(board, "k", 2)
    board.mouse.move(x, y)
    board.mouse.down()
    board.mouse.move(5, 5)
    board.mouse.up()
    assert place(board, "k", 2) == [-2.4, 2.4]


def test_keyboard(board):
    "Each handle can be reached, says what and where it is, and moves by 0.05, with Shift by 0.25; the page does not scroll."
    assert board.locator('.handle[tabindex="0"][role="slider"]').count() == 8
    one = handle(board, "k", 1)
    one.focus()
    assert one.get_attribute("aria-label") == "key of token 1 at 0.10, 1.10"
    board.evaluate("addEventListener('keydown', e => (window.kept ??= []).push([e.key, e.defaultPrevented]))")
    moved = changed(board, lambda: [board.keyboard.press(key) for key in ("ArrowRight", "Shift+ArrowDown", "ArrowUp")])
    assert {"now", "key-key", "sum", "trails"} <= moved
    assert place(board, "k", 1) == [0.15, 0.9]
    kept = dict(board.evaluate("kept"))
    assert kept["Shift"] is False and all(kept[key] for key in ("ArrowRight", "ArrowDown", "ArrowUp"))
    assert one.get_attribute("aria-label") == "key of token 1 at 0.15, 0.90"
    board.keyboard.press("Tab")
    assert handle(board, "k", 2).evaluate("e => e === document.activeElement")


def touch(page, *points):
    "One finger from the first point to the last."
    send = page.context.new_cdp_session(page).send
    for kind, (x, y) in [("touchStart", points[0]), *(("touchMove", p) for p in points[1:])]:
        send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
    send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_touch(new_page, base):
    "On a telephone a finger on a handle drags it, and the page stays; beside the handles it scrolls the page, and moves none."
    page = opened(new_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True), base)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    x, y = centre(page, "q", 3)
    path = [(x, y), (x + 20, y), (x + 40, y - 30), (x + 50, y - 60)]
    assert {"now", "trails"} <= changed(page, lambda: touch(page, *path))
    assert centre(page, "q", 3) == pytest.approx((x + 50, y - 60), abs=1.5) and page.evaluate("scrollY") == 0
    box = page.locator(".plane svg").bounding_box()
    x, y = box["x"] + 20, box["y"] + box["height"] - 10
    assert changed(page, lambda: touch(page, (x, y), (x, y - 40), (x, y - 120), (x, y - 200))) == set()
    page.wait_for_function("scrollY > 50")
    assert page.errors == []


def test_no_step_is_plain_attention(board):
    choose(board, dt=0)
    shown = everything(board)
    assert np.all(shown["now"] == shown["plain"])
    assert all(np.all(shown[name] == 0) for name in (*TERMS[1:], "rest"))
    board.get_by_text("The two maps are the same.").wait_for()


def test_controls(board):
    "Each control changes what hangs on it, and nothing else."
    moving = {"now", "rest", "sum", "trails"}
    all_terms = {*TERMS[1:], "now", "sum", "trails"}
    assert changed(board, lambda: choose(board, dt=0.8)) == all_terms
    assert changed(board, lambda: choose(board, step="leapfrog")) == moving
    assert changed(board, lambda: choose(board, n=3)) == all_terms | moving
    assert changed(board, lambda: choose(board, force="swirl")) == {"query-force", "key-force", *moving}
    assert changed(board, lambda: choose(board, causal=True)) == {"plain", "now"}
    assert np.all(np.triu(matrix(board, "now"), 1) == 0) and np.all(matrix(board, "plain")[0] == [1, 0, 0, 0])
    assert "0.80" in board.locator("output").first.inner_text() and board.locator("output").nth(1).inner_text() == "3"


def test_terms_and_rest_make_the_scores(board):
    "For any rule and number of steps: what the four terms leave over is shown, not hidden."
    choose(board, step="rk4", n=4, dt=0.2, force="pendulum")
    shown = everything(board)
    close(sum(shown[name] for name in (*TERMS, "rest")), shown["sum"], 0.031)  # six rounded numbers
    assert np.abs(shown["rest"]).max() > 0.05
    assert "n dt = 0.80" in board.locator(".note").inner_text()


def test_reset(board):
    "Reset restores tokens, controls and all that follows."
    first = everything(board)
    choose(board, dt=1.1, n=7, step="leapfrog", force="bent", causal=True)
    handle(board, "q", 2).focus()
    board.keyboard.press("Shift+ArrowLeft")
    assert np.any(matrix(board, "plain") != first["plain"])
    board.get_by_role("button", name="Reset").click()
    again = everything(board)
    assert all(np.all(first[name] == again[name]) for name in first)
    values = board.locator(".play form").evaluate(
        "f => [f.dt.value, f.n.value, f.step.value, f.force.value, f.causal.checked]"
    )
    assert values == ["0.3", "1", "euler", "spring", False]


def measured(page, what):
    "A line of the list of measures, as numbers."
    text = page.locator(".measures div", has_text=what).locator("dd").inner_text()
    return [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", text.replace("−", "-"))]


def set_up(page, i):
    page.locator("a[data-set]").nth(i).click()


def test_things_to_try(board):
    "What the text promises for each of its six settings is what the page shows."
    assert board.locator("a[data-set]").count() == 6
    set_up(board, 0)
    assert measured(board, "queries moved") == [0.0]
    set_up(board, 1)
    before = everything(board)
    handle(board, "k", 2).focus()
    board.keyboard.press("Shift+ArrowUp")
    after = everything(board)
    only = lambda name: set(zip(*np.nonzero(before[name] != after[name]), strict=True))
    assert {j for _, j in only("query-key")} == {2}
    assert all(2 in pair for pair in only("key-key")) and {(2, 0), (2, 1), (2, 3)} <= only("key-key")
    set_up(board, 2)
    rows = lambda name: {tuple(row) for row in matrix(board, name)}
    assert len(rows("plain")) == 1 and len(rows("now")) == 4
    assert np.all(matrix(board, "query-force") == 0) and np.all(matrix(board, "key-force") == 0)
    set_up(board, 3)
    assert min(measured(board, "volume")) > 2 and max(measured(board, "way back")) > 0.1
    assert matrix(board, "now").max() > matrix(board, "plain").max() + 0.2
    for step in ("leapfrog", "leapfrog_dkd"):
        choose(board, step=step)
        assert measured(board, "volume") == [1.0] and measured(board, "way back") == [0.0]
    set_up(board, 4)
    reach = lambda: np.abs(matrix(board, "sum")).max()
    near = reach()
    choose(board, dt=2.1)
    assert reach() > 1000 * near and measured(board, "volume") == [1.0]
    set_up(board, 5)
    assert measured(board, "volume") == [1.0] and "none" in board.locator(".measures").inner_text()
    assert measured(board, "queries moved")[0] > 100


CONTRAST = """all => all.map(e => {
  const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const light = colour => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(e), back = e.matches(".number, .handle text") ? getComputedStyle(e.previousElementSibling).fill : getComputedStyle(document.body).backgroundColor;
  const [a, b] = [light(e instanceof SVGElement ? style.fill : style.color), light(back)].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), e.textContent];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_contrast(new_page, base, scheme, width):
    "Every number can be read on its cell, every label on the page: contrast of 4.5 at least."
    page = opened(new_page(viewport={"width": width, "height": 900}), base)
    if scheme == "dark":
        page.evaluate("document.querySelector('.quarto-color-scheme-toggle').click()")
        page.wait_for_function("document.documentElement.classList.contains('quarto-dark')")
    choose(page, dt=0.6, n=3)
    for share in (0, 0.5, 1):  # numbers on the palest and on the fullest cells; in the end all are full
        page.locator(".play rect").evaluate_all(
            "(all, s) => all.forEach(e => e.style.setProperty('--share', s))", share
        )
        assert [f for f in page.locator(".play .number").evaluate_all(CONTRAST) if f[0] < 4.5] == []
    found = page.locator(
        ".play :is(.number, .handle text, figcaption, .title, .legend, .legend span, label, dt, dd, .note)"
    ).evaluate_all(CONTRAST)
    assert len(found) > 130 and [f for f in found if f[0] < 4.5] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_finger_sized(new_page, base):
    "On a telephone every control is large enough, and what a finger must meet of a handle, too."
    page = opened(new_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True), base)
    for box in (b.bounding_box() for b in page.locator(".play :is(select, button, .check)").all()):
        assert box["height"] >= 40
    assert min(b.bounding_box()["width"] for b in page.locator(".handle .hit").all()) >= 30

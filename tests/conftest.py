"What all tests share: where the project is, whether the saved outputs were made in this environment, a browser with the site."

import functools, os, re, shutil, subprocess, sys, sysconfig, threading, venv
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CI = os.environ.get("CI", "").lower() in ("1", "true")
os.environ.setdefault("MPLBACKEND", "Agg")  # no test opens a window
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # our tensors are small, and on a busy machine threads wait for each other

# The notebooks' tools need Python 3.11; on 3.10 only the library itself is tested.
TOOLS = [
    "test_notebooks.py",
    "test_packaging.py",
    "test_playground.py",
    "test_project.py",
    "test_quiz.py",
    "test_site.py",
    "test_site_quality.py",
]
collect_ignore = TOOLS if sys.version_info < (3, 11) else []


def deviations() -> list[str]:
    "In what this environment differs from constraints.txt, which saved outputs were made with."
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    made_with = re.search(r"^# python==(\S+)", text, re.M)[1]
    here = ".".join(map(str, sys.version_info[:2]))
    found = [] if here == made_with else [f"Python {here}, not {made_with}"]
    for name, pinned in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M):
        try:
            installed = version(name).split("+")[0]
        except PackageNotFoundError:
            continue
        if installed != pinned:
            found.append(f"{name} {installed}, not {pinned}")
    return found


def pytest_report_header() -> str:
    other = "; ".join(deviations())
    return f"saved outputs: not compared ({other})" if other else "saved outputs: compared with a fresh run"


FILES = ["settings.ini", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    "A folder with the sdist and the wheel made from it; built from a copy, so that nothing of an older build gets in."
    work = tmp_path_factory.mktemp("dist")
    for name in FILES:
        shutil.copy(ROOT / name, work)
    shutil.copytree(ROOT / "coupled_qk", work / "coupled_qk", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--outdir", work / "out", work)
    return work / "out"


@pytest.fixture(scope="session")
def python(dist, tmp_path_factory):
    "The Python of a new environment that holds the wheel alone, and borrows torch and the others from this one."
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", *dist.glob("*.whl")
    )
    # Installing torch again would take minutes and test nothing of ours. A .pth file makes this environment's packages
    # importable but not its editable install of coupled_qk, as .pth files found by way of a .pth file are not read.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    with open(f"{site}/borrowed.pth", "w") as f:
        f.write(sysconfig.get_path("purelib"))
    return python


def said(capsys, checker, answer):
    "A checker of an exercise: the verdict and its words; exactly one line of them."
    right = checker(answer)
    out = capsys.readouterr()
    assert out.err == "" and out.out.count("\n") == 1 and out.out.startswith("Right: " if right else "Not yet: ")
    return right, out.out


SITE = ROOT / "_docs"
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = [
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@functools.cache
def missing_for_site() -> str:
    "What the tests of the built site need and do not find here; nothing where they can run."
    needs = {
        "Chromium": CHROMIUM,
        "a Playwright that starts": not subprocess.run(
            [sys.executable, "-m", "playwright", "-V"], capture_output=True
        ).returncode,
        "a built site (make docs)": any(SITE.rglob("*.html")),
        "KaTeX in the site": (SITE / "site_libs/katex").is_dir(),
    }
    return ", ".join(need for need, there in needs.items() if not there)


@pytest.fixture(scope="module")
def base():
    "The address of a server that holds the built site."
    assert not missing_for_site(), f"needs {missing_for_site()}"  # at once, not after each test's time-out

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # not there where only the library is tested

    with sync_playwright() as p:
        yield p.chromium.launch(executable_path=CHROMIUM, args=FLAGS, chromium_sandbox=False)


@pytest.fixture
def new_page(browser, base):
    "Opens pages that note their errors, and every request to elsewhere, which is stopped."
    contexts = []

    def make(**options):
        contexts.append(browser.new_context(**{"color_scheme": "light", **options}))
        page = contexts[-1].new_page()
        page.errors, page.outside = [], []

        def route(r):
            if r.request.url.startswith((base, "data:", "blob:")):
                return r.continue_()
            page.outside.append(r.request.url)
            r.abort()

        page.route("**/*", route)
        page.on("console", lambda m: m.type == "error" and page.errors.append(m.text))
        page.on("pageerror", lambda e: page.errors.append(str(e)))
        return page

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def page(new_page):
    return new_page(viewport={"width": 1280, "height": 900})

"""Write what frames each lesson from the one order file, nbs/lessons.toml: header, install cell and footer, and the
course table of index.ipynb. Running it twice changes nothing. --check only compares."""

import sys, tomllib
from pathlib import Path

from fastcore.nbio import nb2str, read_nb
from nbdev.config import get_config

CFG = get_config(Path(__file__).parents[1])
REPO, BRANCH = CFG.git_url.rstrip("/"), CFG.branch
COLAB = REPO.replace("https://github.com", "https://colab.research.google.com/github")

INSTALL = f"""#| hide
# In Colab: install the package, with Colab's own torch. Everywhere: waiting threads sleep, which helps a busy machine.
import importlib.util, os, sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # heeded only before torch is imported
if "google.colab" in sys.modules and not importlib.util.find_spec("coupled_qk"):
    %pip install -q git+{REPO}"""


def lessons() -> list[dict]:
    "The lessons in reading order."
    return tomllib.loads((CFG.nbs_path / "lessons.toml").read_text(encoding="utf-8"))["lesson"]


def link(lesson: dict, words: str = "") -> str:
    return f"[{words or lesson['title']}]({lesson['name']}.ipynb)"


def turn(i: int, all_lessons: list[dict]) -> str:
    "Links to the lesson before, the course and the lesson after."
    before = [f"← {link(all_lessons[i - 1])}"] if i else []
    after = [f"{link(all_lessons[i + 1])} →"] if i + 1 < len(all_lessons) else []
    return " · ".join([*before, "[the course](index.ipynb)", *after])


def minutes(seconds: int) -> str:
    return f"{seconds} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def bullets(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def header(i: int, all_lessons: list[dict]) -> str:
    lesson, names = all_lessons[i], {x["name"]: x for x in all_lessons}
    needs = ", ".join(
        f"chapter {link(names[n], n[:2] + ' ' + names[n]['title'])}" if n in names else n for n in lesson["needs"]
    )
    return f"""# {lesson["title"]}

> {lesson["claim"]}

[![Open in Colab](images/colab.svg)]({COLAB}/blob/{BRANCH}/{CFG.nbs_path.name}/{lesson["name"]}.ipynb)

{turn(i, all_lessons)}

**You will learn to**

{bullets(lesson["aims"])}

**You need** {needs}. Symbols and terms are on the [notation page](notation.ipynb).
**It takes** about {minutes(lesson["seconds"])} of computing on two CPU cores."""


def footer(i: int, all_lessons: list[dict]) -> str:
    lesson = all_lessons[i]
    return f"""## What we showed

{bullets(lesson["shown"])}

## What we did not show

{bullets(lesson["not_shown"])}

## References

{bullets(lesson["references"])}

{turn(i, all_lessons)}"""


def course(all_lessons: list[dict]) -> str:
    rows = [f"| {x['name'][:2]} {link(x)} | {x['claim']} | {minutes(x['seconds'])} |" for x in all_lessons]
    return "\n".join(["| chapter | in a line | computing |", "|---|---|---:|", *rows])


def cell(id: str, kind: str, source: str) -> dict:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": id, "metadata": {}, "source": source, **code}


def framed(path: Path, top: list[dict], bottom: list[dict]) -> str:
    "The notebook's text with these cells as its first and last."
    nb = read_nb(path)
    kept = [c for c in nb.cells if not str(c.get("id", "")).startswith("frame-")]
    nb.cells = [*top, *kept, *bottom]
    return nb2str(nb)


def indexed(path: Path, table: str) -> str:
    nb = read_nb(path)
    for c in nb.cells:
        if c.get("id") == "frame-course":
            c.source = table
    return nb2str(nb)


def main() -> int | str:
    all_lessons, wanted = lessons(), {}
    for i, lesson in enumerate(all_lessons):
        path = CFG.nbs_path / f"{lesson['name']}.ipynb"
        top = [cell("frame-header", "markdown", header(i, all_lessons)), cell("frame-install", "code", INSTALL)]
        wanted[path] = framed(path, top, [cell("frame-footer", "markdown", footer(i, all_lessons))])
    index = CFG.nbs_path / "index.ipynb"
    wanted[index] = indexed(index, course(all_lessons))
    stale = [p for p, text in wanted.items() if p.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        return f"stale frames in {', '.join(p.name for p in stale)}; run: make frame" if stale else 0
    for p in stale:
        p.write_text(wanted[p], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

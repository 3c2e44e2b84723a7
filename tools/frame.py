"""Write what frames each lesson from the one order file, nbs/lessons.toml: header, install cell and footer, and the
course tables of index.ipynb and course.ipynb. Running it twice changes nothing. --check only compares."""

import re, sys, tomllib
from pathlib import Path

from fastcore.nbio import nb2str, read_nb
from nbdev.config import get_config

from coupled_qk.files import write_whole

CFG = get_config(Path(__file__).parents[1])
REPO, BRANCH = CFG.git_url.rstrip("/"), CFG.branch
COLAB = REPO.replace("https://github.com", "https://colab.research.google.com/github")

INSTALL = """#| hide
# In Colab: install the package, with Colab's own torch. Everywhere: waiting threads sleep, which helps a busy machine.
import importlib.util, os, sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # heeded only before torch is imported
if "google.colab" in sys.modules and not importlib.util.find_spec("coupled_qk"):
    %pip install -q {}"""


def install(lesson: dict) -> str:
    "The cell that installs the package in Colab, with the extra that the lesson needs."
    extra = lesson.get("extra")
    return INSTALL.format(f'"coupled_qk[{extra}] @ git+{REPO}"' if extra else f"git+{REPO}")


KINDS = {"name": str, "title": str, "claim": str, "seconds": int} | dict.fromkeys(
    ("aims", "needs", "shown", "not_shown", "references"), list
)
WORDS = {str: "text", int: "a whole number", list: "a list of texts"}


def lessons() -> list[dict]:
    "The lessons in reading order. Raises ValueError, in one sentence, where the order file is broken."
    try:
        found = tomllib.loads((CFG.nbs_path / "lessons.toml").read_text(encoding="utf-8")).get("lesson")
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"it is not TOML: {e}") from None
    if not isinstance(found, list) or not all(isinstance(x, dict) for x in found):
        raise ValueError("it must hold [[lesson]] entries")
    names = [str(lesson.get("name", f"number {i}")) for i, lesson in enumerate(found, 1)]
    for name, lesson in zip(names, found, strict=True):
        if problem := wrong_kind(lesson) or wrong_name(name, lesson["needs"], names):
            raise ValueError(f"lesson {name}: {problem}")
    return found


def wrong_kind(lesson: dict) -> str | None:
    "Which key of a lesson is missing, unknown or of another kind than it should be, if any."
    for key, kind in KINDS.items():
        value = lesson.get(key)
        if value is None:
            return f"the key {key!r} is missing"
        if not isinstance(value, kind) or kind is list and not (value and all(isinstance(x, str) for x in value)):
            return f"{key!r} must be {WORDS[kind]}, and is {repr(value)[:60]}"
    unknown = sorted(set(lesson) - {*KINDS, "draft", "extra"})
    return f"no lesson has a key {unknown[0]!r}" if unknown else None


def wrong_name(name: str, needs: list[str], names: list[str]) -> str | None:
    "What is wrong with a lesson's name or with those that it needs, if anything."
    if names.count(name) > 1:
        return "its 'name' stands there twice"
    if not (CFG.nbs_path / f"{name}.ipynb").is_file():
        return f"its 'name' must be that of a notebook, and there is no nbs/{name}.ipynb"
    strangers = [need for need in needs if re.fullmatch(r"\d\d_\w+", need) and need not in names]
    return f"'needs' names {strangers[0]}, which is no lesson" if strangers else None


def label(lesson: dict) -> str:
    "How a lesson is called: number and title."
    return f"{lesson['name'][:2]} {lesson['title']}"


def link(lesson: dict) -> str:
    return f"[{label(lesson)}]({lesson['name']}.ipynb)"


def turn(i: int, all_lessons: list[dict]) -> str:
    "Links to the lesson before, the course and the lesson after."
    before = [f"← {link(all_lessons[i - 1])}"] if i else []
    after = [f"{link(all_lessons[i + 1])} →"] if i + 1 < len(all_lessons) else []
    return " · ".join([*before, "[the course](course.ipynb)", *after])


def minutes(seconds: int) -> str:
    return f"{seconds} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def short(seconds: int) -> str:
    "The time as a table has it."
    return minutes(seconds).replace("seconds", "s").replace("minutes", "min")


def bullets(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def header(i: int, all_lessons: list[dict]) -> str:
    lesson, names = all_lessons[i], {x["name"]: x for x in all_lessons}
    needs = [f"chapter {link(names[n])}" if n in names else n for n in lesson["needs"]]
    return f"""# {label(lesson)}

> {lesson["claim"]}

[![Open in Colab](images/colab.svg)]({COLAB}/blob/{BRANCH}/{CFG.nbs_path.name}/{lesson["name"]}.ipynb)

{turn(i, all_lessons)}

**You will learn to**

{bullets(lesson["aims"])}

**You need** {", and ".join(filter(None, [", ".join(needs[:-1]), needs[-1]]))}. Symbols and terms are on the [notation page](notation.ipynb).

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
    rows = [f"| {link(x)} | {x['claim']} | {short(x['seconds'])} |" for x in all_lessons]
    return "\n".join(["| chapter | in a line | time |", "|---|---|---:|", *rows])


def course_map(all_lessons: list[dict]) -> str:
    "Every lesson with its claim, what it needs and its time."
    names = {x["name"]: x for x in all_lessons}
    need = lambda x: "; ".join(f"[{n[:2]}]({n}.ipynb)" if n in names else n for n in x["needs"])
    rows = [f"| {link(x)} | {x['claim']} | {need(x)} | {short(x['seconds'])} |" for x in all_lessons]
    total = sum(x["seconds"] for x in all_lessons) / 60
    head = f"All of them together compute for about {total:.0f} minutes on two CPU cores; reading and thinking take longer."
    return "\n".join([head, "", "| chapter | claim | you need | time |", "|---|---|---|---:|", *rows])


def cell(id: str, kind: str, source: str) -> dict:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": id, "metadata": {}, "source": source, **code}


def framed(path: Path, top: list[dict], bottom: list[dict]) -> str:
    "The notebook's text with these cells as its first and last."
    nb = read_nb(path)
    kept = [c for c in nb.cells if not str(c.get("id", "")).startswith("frame-")]
    nb.cells = [*top, *kept, *bottom]
    return nb2str(nb)


def filled(path: Path, id: str, table: str) -> str:
    "The notebook's text with this table in the cell of that name."
    nb = read_nb(path)
    for c in nb.cells:
        if c.get("id") == id:
            c.source = table
    return nb2str(nb)


def main() -> int | str:
    try:
        all_lessons, wanted = lessons(), {}
    except ValueError as e:
        return f"nbs/lessons.toml cannot be used: {e}"
    for i, lesson in enumerate(all_lessons):
        path = CFG.nbs_path / f"{lesson['name']}.ipynb"
        top = [cell("frame-header", "markdown", header(i, all_lessons)), cell("frame-install", "code", install(lesson))]
        wanted[path] = framed(path, top, [cell("frame-footer", "markdown", footer(i, all_lessons))])
    for name, id, table in (("index", "frame-course", course), ("course", "frame-map", course_map)):
        path = CFG.nbs_path / f"{name}.ipynb"
        wanted[path] = filled(path, id, table(all_lessons))
    stale = [p for p, text in wanted.items() if p.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        return f"stale frames in {', '.join(p.name for p in stale)}; run: make frame" if stale else 0
    for p in stale:
        write_whole(p, wanted[p].encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

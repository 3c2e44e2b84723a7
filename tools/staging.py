"Stage the notebooks in _proc/ for a renderer: nbdev's own step, then what it leaves out of a page."

import base64, html, re
from pathlib import Path

from fastcore.nbio import mk_cell, read_nb, write_nb
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs
from reference import exported_to, prose, write_reference


def image_tag(href: str, meta: dict) -> str:
    "The HTML of a picture; what `meta` has of alt text and width is kept, and nothing is made up."
    attrs = {"src": href, "class": "img-fluid", **{k: str(meta[k]) for k in ("alt", "width") if meta.get(k)}}
    pairs = (f'{k}="{html.escape(" ".join(v.split()))}"' for k, v in attrs.items())
    return f"<img {' '.join(pairs)}>"


def pictures(nb, path: Path) -> None:
    "Move PNG outputs into images/ beside the staged notebook, so that both renderers and the README show the same tag."
    n = 0
    for out in (o for c in nb.cells if c.cell_type == "code" for o in c.outputs):
        if "image/png" not in out.get("data", {}):
            continue
        n += 1
        file = path.parent / "images" / f"{path.stem}-{n}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(base64.b64decode("".join(out["data"]["image/png"])))
        tag = image_tag(f"images/{file.name}", out.get("metadata", {}).get("image/png", {}))
        out["data"] = {"text/html": tag}


def opening(nb, source) -> None:
    "Put back what follows the title and the claim in the first cell: nbdev keeps those two lines only."
    first = source.cells[0].source
    rest = re.sub(r"^(#|>) .*\n?", "", first, count=2, flags=re.M).strip()
    if first.startswith("# ") and rest:
        nb.cells.insert(1, mk_cell(NbdevLookup().linkify(rest), "markdown"))


def bar(nb, source, path: str) -> None:
    "Under the opening of a page with code: its module in the API reference, and the notebook (build_site.py puts it there)."
    if all(c.cell_type == "markdown" for c in source.cells):
        return
    up, module = "../" * path.count("/"), exported_to(source)
    links = [f"[API reference: `coupled_qk.{module}`]({up}api/{module}.ipynb)"] if module else []
    links.append(f'<a href="{up}notebooks/{path}" download>Download this notebook</a>')
    n_opening = 2 if "\n\n" in source.cells[0].source.partition("\n> ")[2] else 1
    nb.cells.insert(n_opening, mk_cell(" · ".join(links), "markdown"))


VOICES = {"The paper says": "note", "We chose": "tip", "We measured": "important"}
VOICE = re.compile(rf"^> \*\*({'|'.join(VOICES)})\*\*\n((?:>.*(?:\n|\Z))+)", re.M)


def boxed(text: str) -> str:
    "A quotation that opens with the name of a voice becomes a callout; Jupyter, GitHub and Colab show the quotation."

    def box(m: re.Match) -> str:
        body = re.sub(r"^> ?", "", m[2], flags=re.M).strip()
        return f'::: {{.callout-{VOICES[m[1]]} title="{m[1]}"}}\n{body}\n:::\n'

    return VOICE.sub(box, text)


def voices(nb) -> None:
    "Give each of the three voices its box, in prose and in outputs."
    for c in nb.cells:
        if c.cell_type == "markdown":
            c.source = boxed(c.source)
        for data in (o.get("data", {}) for o in c.get("outputs", [])):
            if "text/markdown" in data:
                data["text/markdown"] = boxed("".join(data["text/markdown"]))


def signatures(nb) -> None:
    "Where a page shows the source of a function, do not show its signature and docstring a second time above it."
    sources = [c for c in nb.cells if c.cell_type == "code" and "#| exports: true" in c.source]
    for c in sources:
        c.source = re.sub(r"#\| code-(fold|summary): .*\n", "", c.source)
    shown = set(re.findall(r"^(?:def|class) (\w+)", "\n".join(c.source for c in sources), re.M))
    for c in nb.cells:
        name = re.search(r"^show_doc\((\w+)\)", c.source, re.M)
        for out in c.get("outputs", []) if name and name[1] in shown else []:
            text = "".join(out.get("data", {}).get("text/markdown", ""))
            out["data"] = {"text/markdown": text.partition("```python")[0]}


def references(nb, source, path: str) -> None:
    "Beside each documented name's link to its source, one to its place in the API reference."
    module, up = exported_to(source), "../" * path.count("/")
    for c in nb.cells:
        name = re.search(r"^show_doc\((\w+)\)", c.source, re.M)
        for data in (o.get("data", {}) for o in c.get("outputs", []) if name and module):
            link = f'[API]({up}api/{module}.ipynb#{name[1]}){{style="float:right; font-size:smaller; margin-left:1em"}}'
            data["text/markdown"] = "".join(data["text/markdown"]).replace("[source](", f"{link} [source](", 1)


def levels(nb) -> None:
    "Where documented functions follow the title at once, as in the appendix, their headings are the sections: no level is left out."
    under = 1
    for c in nb.cells:
        if c.cell_type == "markdown":
            under = len((re.findall(r"^#+(?= )", prose(c), re.M) or ["#" * under])[-1])
        for data in (
            o.get("data", {}) for o in c.get("outputs", []) if re.search(r"^show_doc\(", c.source, re.M) and under == 1
        ):
            data["text/markdown"] = re.sub(r"^###(?= )", "##", "".join(data["text/markdown"]), flags=re.M)


def stage(pattern: str = "") -> Path:
    "Stage every notebook, or those whose name matches `pattern`; `_proc` is made anew, as exported code may have changed."
    refresh_quarto_yml()  # nbs/nbdev.yml, from pyproject.toml
    try:
        folder = proc_nbs(n_workers=2, force=True, file_re=pattern)
    except Exception as e:  # from a worker: two pages of traceback, and its message says it all
        raise SystemExit(f"The notebooks could not be staged. {e}") from None
    for path in sorted(folder.rglob("*.ipynb")):
        nb, name = read_nb(path), path.relative_to(folder).as_posix()
        source = read_nb(get_config().nbs_path / name)
        opening(nb, source)
        if not pattern:
            bar(nb, source, name)
            references(nb, source, name)
        pictures(nb, path)
        signatures(nb)
        levels(nb)
        voices(nb)
        write_nb(nb, path)
    if not pattern:
        write_reference(folder)
    return folder

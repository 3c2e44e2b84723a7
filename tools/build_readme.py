"""Write the documents at the top of the repository from their notebooks: hidden cells out, links and pictures right from
there. --check only compares."""

import re, shutil, sys
from pathlib import Path

from nbdev.config import get_config
from smalldocs import llms
from smalldocs.notebook import to_markdown
from staging import stage

DOCUMENTS = {"index": "README.md", "contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
NOTE = "<!-- Written from nbs/{}.ipynb by tools/build_readme.py: edit the notebook, not this file. -->\n\n"


def local(href: str) -> str:
    "A link of the notebook as the top of the repository sees it; addresses and anchors stay as they are."
    return href if re.match(r"[a-z][a-z0-9+.-]*:|[#/]", href) else (Path("nbs") / href).as_posix()


def written(folder: Path, name: str) -> bytes:
    "The document that the staged notebook of this name becomes."
    text = (folder / f"{name}.ipynb").read_text(encoding="utf-8")
    body, _ = llms.notebook(text, {}, name, llms.Prose(local, {}), str)
    body = re.sub(r"<!-- WARNING: THIS FILE.*?-->\n*", "", body)
    body = re.sub(r'(?<=<img src=")[^"]+', lambda m: local(m[0]), body).replace(' class="img-fluid"', "")
    front = to_markdown(text)[0]
    return (NOTE.format(name) + llms.page_markdown(front["title"], front["description"], body)).encode()


def main():
    top, folder = get_config().config_path, stage(rf"^({'|'.join(DOCUMENTS)})\.ipynb$")
    files = {Path(file): written(folder, name) for name, file in DOCUMENTS.items()}
    files |= {Path("nbs") / p.relative_to(folder): p.read_bytes() for p in folder.glob("images/index-*.png")}
    shutil.rmtree(folder)  # it holds these notebooks only; the site stages all of them
    stale = [f for f, data in files.items() if not (top / f).is_file() or (top / f).read_bytes() != data]
    if "--check" in sys.argv:
        return f"stale: {', '.join(map(str, stale))}; run: make readme" if stale else 0
    for f in stale:
        (top / f).write_bytes(files[f])


if __name__ == "__main__":
    sys.exit(main())

"""Build the site in _docs/ from the notebooks: nbdev stages them in _proc/, smalldocs renders them; no Quarto, no network.

--stage  only stage     --quarto  let Quarto render the same staged notebooks (as the published site is made)"""

import html, json, re, shutil, subprocess, sys, unicodedata
from pathlib import Path, PurePosixPath as P

from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.quarto import _fix_quarto_nav
from nbdev.quarto_render import render_quarto
from smalldocs import layout
from smalldocs.config import load
from smalldocs.site import Site, rel
from staging import stage

KATEX = ("katex.min.css", "katex.min.js", "contrib/auto-render.min.js")  # Debian has the last without `.min`
REMOTE = re.compile(
    r'<link rel="stylesheet"\s+href="[^"]*font-awesome[^"]*">|@import url\([^)]*fonts\.googleapis[^)]*\);?'
)
COMMA = re.compile(r'(<span class="math inline">[^<]*</span>[.,;:!?)]+)')  # else the comma may begin the next line
CODE = re.compile(r'(<code class="sourceCode \w+">)(.*?)(</code>)', re.S)
BREAK = re.compile(r'(?<=[\w>]\()(?!\))|(?<=[)\]])(?=<span class="op">\.<)')  # where a line of code had best wrap
NAMED = {  # what a screen reader calls the parts of a page; a toggle is a button, which the keyboard reaches
    '<nav class="navbar ': '<nav aria-label="Site" class="navbar ',
    '<nav class="quarto-secondary-nav"': '<nav aria-label="Section" class="quarto-secondary-nav"',
    '<nav id="quarto-sidebar"': '<nav aria-label="All pages" id="quarto-sidebar"',
    '<nav class="page-navigation"': '<nav aria-label="Neighbouring pages" class="page-navigation"',
    '<div class="toc-actions"': '<div role="region" aria-label="This page on GitHub" class="toc-actions"',
    ' role="navigation" aria-expanded': " aria-expanded",
}
PLAYER = re.compile(r'<div class="qk-animation".*?alt="([^"]*)".*?</script></div>', re.S)
BOX = re.compile(r'<div class="callout-\w+" title="([^"]+)">\n(.*?)\n</div>', re.S)
SEARCH = {
    "threshold: 0.3": "threshold: 0.1, ignoreFieldNorm: true",
    "|| 20": "|| 30",
}  # what is said, in order of the pages
TOGGLE = re.compile(r'<a (class="sidebar-item-[^>]*data-bs-toggle[^>]*>)(.*?)</a>')
KNOWN = re.compile("output-file is not read|unknown key format-links|format.*commonmark")  # Quarto's, no harm here


def katex_source() -> Path | None:
    "A folder with KaTeX: Debian's libjs-katex, or the package `katex` of npm, installed here or globally."
    found = [Path("/usr/share/javascript/katex"), Path("node_modules/katex/dist")]
    if shutil.which("npm"):
        root = subprocess.run(["npm", "root", "--global"], capture_output=True, text=True).stdout.strip()
        found.append(Path(root, "katex/dist"))
    return next((p for p in found if (p / KATEX[0]).is_file()), None)


def readable(tex: str) -> str:
    r"TeX as a search result shows it: \Delta t\,k_i becomes Δ t k_i."

    def command(m):
        for case in ("SMALL", "CAPITAL") if m[1].islower() else ("CAPITAL",):
            try:
                return unicodedata.lookup(f"GREEK {case} LETTER {m[1]}")
            except KeyError:
                pass
        return {"cdot": "·", "top": "ᵀ", "le": "≤", "ge": "≥", "times": "×", "sqrt": "√", "sum": "Σ"}.get(m[1], " ")

    text = re.sub(r"\\([A-Za-z]+)|\\.", lambda m: command(m) if m[1] else " ", tex)
    return " ".join(re.sub(r"[{}&]", "", text).split())


def lines(code: str) -> str:
    "Each line of highlighted code in a span of its own, as Quarto has it; where it wraps, it hangs (styles.css)."
    out, still_open = [], ""
    for line in BREAK.sub("<wbr>", code).split("\n"):
        line, tags = still_open + line, []
        for tag in re.findall(r"<span[^>]*>|</span>", line):
            tags.append(tag) if tag != "</span>" else tags.pop()
        still_open = "".join(tags)
        text = html.unescape(re.sub(r"<[^>]*>", "", line))
        hang = min(len(text) - len(text.lstrip()) + 2, 14)
        out.append(f'<span class="line" style="--hang: {hang}ch">{line}{"</span>" * len(tags)}</span>')
    return "\n".join(out)


def plain(markdown: str) -> str:
    "A page's Markdown copy without what only a browser can use: a player becomes its words, a box its voice in bold."
    return BOX.sub(r"**\1**\n\n\2", PLAYER.sub(r"*A moving picture: \1*", markdown))


def searching(script: str) -> str:
    "The search script, less fuzzy: else a chapter is lost among words that only look like what was asked for."
    for old, new in SEARCH.items():
        if script.count(old) != 1:
            raise ValueError(
                f"smalldocs.js has changed: it should hold {old!r} once, and does {script.count(old)} times"
            )
        script = script.replace(old, new)
    return script


class NbdevSite(Site):
    "A smalldocs site that follows nbdev: `output-file` names a page, and links to the site's own address become relative."

    def warn(self, msg):
        if not KNOWN.search(msg):
            super().warn(msg)

    def read(self, src):
        page = super().read(src)
        page.out = page.out.with_name(page.front.get("output-file") or page.out.name)
        return page

    def find_page(self, target):
        return super().find_page(target) or next((p for p in self.pages.values() if p.out == target), None)

    def resolve(self, href, page, record=True):
        base = str(self.project.website.get("site-url") or "").rstrip("/") + "/"
        return super().resolve(
            "/" + href.removeprefix(base) if len(base) > 1 and href.startswith(base) else href, page, record
        )

    def llms_link(self, href, page):
        return re.sub(r"\.llms\.md(?=[#?]|$)", ".html.md", super().llms_link(href, page))

    def write_search(self):
        for page in self.pages.values():
            maths = {
                html.unescape(m) for m in re.findall(r'<span class="math inline">\\\((.*?)\\\)</span>', page.html, re.S)
            }
            for tex in sorted((m for m in maths if re.search(r"[\\{]", m)), key=len, reverse=True):
                for entry in page.env.get("search", []):
                    entry["text"] = entry["text"].replace(" ".join(tex.split()), readable(tex))
        super().write_search()
        file = self.out / "search.json"
        entries = json.loads(file.read_text(encoding="utf-8"))
        later = lambda e: e["href"].startswith(("appendix/", "api/"))  # lessons first
        file.write_text(json.dumps(sorted(entries, key=later), ensure_ascii=False), encoding="utf-8")

    def finish(self):
        "Write the `page.html.md` that nbdev's docstrings point at, put KaTeX into the site, and drop web fonts."
        katex, home = katex_source(), P("site_libs/katex")
        for page in self.pages.values():
            path = self.out / page.out
            path.with_name(f"{path.name}.md").write_text(plain(self.llms_copy(page)[0]), encoding="utf-8")
            text = path.read_text(encoding="utf-8")
            if katex:
                for name in KATEX:
                    text = text.replace(f"{layout.KATEX}/{name}", rel(home / name, page))
            text = CODE.sub(lambda m: m[1] + lines(m[2]) + m[3], text)
            text = COMMA.sub(r'<span class="nobreak">\1</span>', text)
            for old, new in NAMED.items():
                text = text.replace(old, new)
            text = TOGGLE.sub(r'<button type="button" \1\2</button>', text)
            path.write_text(REMOTE.sub("", text), encoding="utf-8")
        script = self.out / "site_libs/smalldocs.js"
        script.write_text(searching(script.read_text(encoding="utf-8")), encoding="utf-8")
        for css in self.out.glob("site_libs/themes/**/*.css"):
            css.write_text(REMOTE.sub("", css.read_text(encoding="utf-8")), encoding="utf-8")
        if not katex:
            return print("KaTeX is not installed here: the pages load it from its ordinary address")
        for name in (*KATEX, *(f"fonts/{f.name}" for f in (katex / "fonts").glob("*.woff2"))):
            file = katex / name
            (self.out / home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file if file.exists() else katex / name.replace(".min", ""), self.out / home / name)


def describe(docs: Path) -> None:
    "Write llms.txt: every page's Markdown copy with its title and its line, in the order of the sidebar, then the others."
    sidebar = Path("_quarto.yml").read_text(encoding="utf-8").partition("contents:")[2]
    names = re.findall(r"([\w/]+)\.ipynb", sidebar)
    order = {re.sub(r"\d\d_(?=[a-z]+\w*$)", "", name): i for i, name in enumerate(names)}
    copies = {
        p.relative_to(docs).as_posix(): p.read_text(encoding="utf-8").splitlines() for p in docs.rglob("*.html.md")
    }
    pages = sorted(copies, key=lambda p: (order.get(p.removesuffix(".html.md"), len(order)), p))
    rows = [f"- [{copies[p][0].lstrip('# ')}]({p}): {copies[p][2]}" for p in pages]
    text = [f"# {get_config().title}", "", f"> {copies[pages[0]][2]}", "", "## Pages", "", *rows, ""]
    (docs / "llms.txt").write_text("\n".join(text), encoding="utf-8")


def main() -> bool:
    docs = get_config().doc_path
    shutil.rmtree(docs, ignore_errors=True)  # first: where the build fails, no older site is taken for the new one
    folder = stage()
    if "--stage" in sys.argv:
        return False
    warnings: list[str] = []
    if "--quarto" in sys.argv:
        render_quarto(folder, folder / docs.name)
    else:
        site = NbdevSite(load(folder), quiet=True)
        site.build()
        site.finish()
        warnings = [w for w in site.warnings if not KNOWN.search(w)]
    shutil.move(folder / docs.name, docs)
    _fix_quarto_nav(docs)
    for path in nbglob(get_config().nbs_path, as_path=True):
        copy = docs / "notebooks" / path.relative_to(get_config().nbs_path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    describe(docs)
    print(*(f"warning: {w}" for w in warnings), f"{len([*docs.rglob('*.html')])} pages in {docs.name}/", sep="\n")
    return bool(warnings)


if __name__ == "__main__":
    sys.exit(main())  # the guard is needed: staging spawns workers

"""The API reference: for each module one staged notebook in api/, and an index of them all. Each public name has its
signature as it stands in the source, its docstring, a link to that source, and one to the lesson section that builds it."""

import ast, re
from pathlib import Path

from fastcore.nbio import mk_cell, new_nb, read_nb, write_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob

CFG = get_config(Path(__file__).parents[1])
HEADING = re.compile(r"^#+ (.+)$", re.M)
Definition = ast.FunctionDef | ast.ClassDef


def exported_to(nb) -> str | None:
    "The module that a notebook exports, if the reference has it; the exercises' checkers are not in it."
    code = "\n".join(c.source for c in nb.cells if c.cell_type == "code")
    found = re.search(r"^#\| default_exp ([a-z]\w*)$", code, re.M)
    return found[1] if found else None


def prose(cell) -> str:
    "A Markdown cell without its blocks of code, in which # opens no heading."
    return re.sub(r"^```.*?^```", "", cell.source, flags=re.S | re.M)


def modules() -> dict[str, Path]:
    "Each module that a notebook exports -> that notebook, in the order of the site."
    order, found = (CFG.config_path / "_quarto.yml").read_text(encoding="utf-8"), {}
    for path in nbglob(CFG.nbs_path, as_path=True):
        if name := exported_to(read_nb(path)):
            found[name] = path
    place = lambda item: order.rindex(item[1].relative_to(CFG.nbs_path).as_posix())
    return dict(sorted(found.items(), key=place))


def sections(path: Path) -> dict[str, str]:
    "Each name that the notebook defines -> the heading of the section in which it does."
    found, heading = {}, ""
    for c in read_nb(path).cells:
        if c.cell_type == "markdown":
            heading = ([heading] + HEADING.findall(prose(c)))[-1]
        elif "#| export" in c.source:
            found |= {
                n: heading
                for n in re.findall(r"^(?:def|class) (\w+)|^(\w+)(?:: [^=]+)? = ", c.source, re.M)
                for n in n
                if n
            }
    return found


def head(node: Definition, lines: list[str]) -> str:
    "A definition up to its body: arguments with their comments, as they stand in the source."
    first = min(n.lineno for n in (node, *node.decorator_list))
    return "\n".join(lines[first - 1 : node.body[0].lineno - 1]).rstrip()


def block(node: Definition, lines: list[str]) -> list[str]:
    "Signature and docstring of a function or a method."
    return [f"```python\n{dedented(head(node, lines))}\n```", ast.get_docstring(node) or ""]


def dedented(code: str) -> str:
    indent = len(code) - len(code.lstrip())
    return "\n".join(line[indent:] for line in code.splitlines())


def definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    "Each name of a module -> the statement that makes it: a definition, an assignment, or an import of a name of ours."
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, Definition):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id: node for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {alias.asname or alias.name: node for alias in node.names}
    return found


def entry(name: str, node: ast.stmt, lines: list[str]) -> list[str]:
    "What a public name is: a function, a class with its public methods, a value, or another module's name."
    if isinstance(node, ast.ImportFrom):
        return [f"The same as [`{node.module}.{name}`]({node.module}.ipynb#{name})."]
    if isinstance(node, ast.FunctionDef):
        return block(node, lines)
    if not isinstance(node, ast.ClassDef):
        return [f"```python\n{shortened(lines[node.lineno - 1 : node.end_lineno])}\n```"]
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    init = [n for n in methods if n.name == "__init__"]
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    shown = [head(node, lines), *(head(n, lines) for n in init)]
    shown += lines[fields[0].lineno - 1 : fields[-1].end_lineno] if fields else []
    parts = ["```python\n" + "\n".join(shown) + "\n```", ast.get_docstring(node) or ""]
    for method in methods:
        if not method.name.startswith("_") and ast.get_docstring(method):
            parts += [f"### {name}.{method.name} {{#{name}.{method.name}}}", *block(method, lines)]
    return parts


def shortened(lines: list[str], most: int = 12) -> str:
    return "\n".join(lines if len(lines) <= most else [*lines[:most], "    ..."])


def page(module: str, notebook: Path) -> tuple[str, str, list[str]]:
    "A module's title, what it is for, and its page in Markdown."
    source = (CFG.lib_path / f"{module}.py").read_text(encoding="utf-8")
    tree, lines, built = ast.parse(source), source.splitlines(), sections(notebook)
    made, package = definitions(tree), CFG.lib_path.name
    local, address = notebook.relative_to(CFG.nbs_path).as_posix(), f"{CFG.git_url}/blob/{CFG.branch}/{package}"
    parts = [f"[All modules](index.ipynb) · [the notebook that builds this module](../{local})"]
    for name in ast.literal_eval(made["__all__"].value):
        node = made[name]
        links = f"[source]({address}/{module}.py#L{node.lineno})"
        if name in built:
            anchor = f"#{name.lower()}" if isinstance(node, Definition) else ""
            links += f" · built in [{built[name]}](../{local}{anchor})"
        parts += [f"## {name} {{#{name}}}", links, *entry(name, node, lines)]
    return f"{package}.{module}", (ast.get_docstring(tree) or "").split("\n\n")[0], parts


def write_reference(folder: Path) -> None:
    "Put the pages into api/ of the staged notebooks."
    rows = ["| module | what it holds |", "|---|---|"]
    for module, notebook in modules().items():
        title, summary, parts = page(module, notebook)
        rows.append(f"| [`{title}`]({module}.ipynb) | {summary} |")
        write_page(folder / "api" / f"{module}.ipynb", title, summary, parts)
    write_page(
        folder / "api/index.ipynb", "API reference", "Every public name of the library, by module.", ["\n".join(rows)]
    )


def write_page(path: Path, title: str, summary: str, parts: list[str]) -> None:
    "One staged notebook of Markdown."
    path.parent.mkdir(exist_ok=True)
    front = f"---\ntitle: '{title}'\ndescription: {summary!r}\noutput-file: {path.stem}.html\n---"
    write_nb(new_nb([mk_cell(front, "raw"), *(mk_cell(p, "markdown") for p in parts if p)]), path)

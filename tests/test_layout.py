"""What holds for the package as a whole: its layers, the size of its files, its docstrings."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import segcapture

ROOT = Path(segcapture.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST = 320  # lines
# What is hard to get right: capture, segments, write-back, emulated tape, fork and join.
CORE = ["capture.py", "recording.py", "segments.py", "replay.py", "arguments.py", "writeback"]
CORE += [f"backends/{name}.py" for name in ("emulated", "tape", "forks", "order")]
LARGEST = 1950  # lines of code in the core

# Each layer imports from those before it alone, and modules of one layer from each other in the order in
# which they stand. A folder stands for all modules in it.
LAYERS = [
    ["errors", "state", "source"],
    ["ambient", "writeback", "operators"],
    ["arguments", "segments", "replay", "options"],
    ["backends"],
    ["recording"],
    ["inspection"],
    ["capture"],
    ["breaks", "callable", "distributed"],
    ["__init__"],
]
# What a module may import besides: `breaks` learns of a capture from the thread's state alone.
ONLY = {"breaks": {"state", "arguments"}}
NAME_CUDA = {
    "cuda.py",
    "forks.py",
    "lanes.py",
    "order.py",
    "pool.py",
    "pool_memory.py",
    "driver.py",
    "kernels.py",
    "nvtx.py",
    "graphs.py",
    "turns.py",
}


def module_of(path):
    """`arguments`, or `backends` for everything in that folder."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def runtime_nodes(path):
    """Every node of a file, but for what only type checkers see."""
    todo = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo.extend(node.orelse)
            continue
        yield node
        todo.extend(ast.iter_child_nodes(node))


def imports_of(path):
    """Modules of the package that a file imports."""
    found = set()
    for node in runtime_nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("segcapture"):
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("segcapture.")}
    return found - {module_of(path)}


def level(module):
    """Position of the module's layer."""
    found = [i for i, layer in enumerate(LAYERS) if module in layer]
    assert found, f"{module} has no layer yet"
    return found[0]


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_imports_go_one_way(path):
    """User code, breaks, capture, segments: none of them knows those who call it."""
    module = module_of(path)
    for imported in imports_of(path):
        assert level(imported) <= level(module), f"{module} imports {imported}, which lies above it"
    if module in ONLY:
        assert imports_of(path) <= ONLY[module]


def test_the_imports_have_no_cycle():
    """Of files, also within a folder."""
    dotted = {path: ".".join(("segcapture", *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES}
    graph = {}
    for path, name in dotted.items():
        nodes = [node for node in runtime_nodes(path) if isinstance(node, ast.ImportFrom) and node.module]
        graph[name] = {node.module for node in nodes} & (set(dotted.values()) - {name})
    done = set()
    while graph.keys() - done:
        ready = {name for name in graph.keys() - done if graph[name] <= done}
        assert ready, f"a cycle among {sorted(graph.keys() - done)}"
        done |= ready


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_only_some_files_name_cuda(path):
    """Everything else would work with another kind of graph."""
    if path.parent.name == "backends" and path.name in NAME_CUDA:
        return
    for node in runtime_nodes(path):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "torch.cuda", f"line {node.lineno}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                assert not re.match(r"(torch\.cuda|cuda)(\.|$)", name), f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_no_file_is_long(path):
    """One sitting reads one."""
    assert len(path.read_text().splitlines()) < LONGEST


def code_lines(path):
    """Lines of a file that are code: neither blank, nor a comment, nor a docstring."""
    text = path.read_text()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                lines -= set(range(statement.lineno, statement.end_lineno + 1))
    return len(lines)


def test_the_core_stays_small():
    """What must be read whole by those who change it."""
    paths = [p for name in CORE for p in ((ROOT / name).rglob("*.py") if "." not in name else [ROOT / name])]
    assert sum(map(code_lines, paths)) < LARGEST


def documented(tree, prefix=""):
    """The public functions and classes of a tree, and the methods of those classes."""
    for node in tree.body:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not named or node.name.startswith("_"):
            continue
        if any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list):
            continue
        yield f"{prefix}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from documented(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_everything_public_has_a_docstring(path):
    """A first line that says what it does, with a full stop."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    for name, node in documented(tree):
        text = ast.get_docstring(node)
        assert text, f"{name} has no docstring"
        assert text.splitlines()[0].rstrip().endswith((".", "?", ":")), f"{name}: {text.splitlines()[0]}"

"""What holds for the package as a whole: its layers and its docstrings."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import segcapture

ROOT = Path(segcapture.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# Each imports from those before it alone. A folder stands for all modules in it.
ORDER = [
    "errors",
    "thread",
    "advice",
    "exclusive",
    "trees",
    "tensors",
    "ambient",
    "operators",
    "outputs",
    "arguments",
    "segments",
    "replay",
    "listener",
    "backends",
    "recorder",
    "inspect",
    "capture",
    "breaks",
    "distributed",
    "callable",
    "__init__",
]
# What a module may import besides: `breaks` learns of a capture from the thread's state alone.
ONLY = {"breaks": {"thread", "arguments", "advice"}}


def module_of(path):
    """`arguments`, or `backends` for everything in that folder."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def nodes_of(path):
    """Every node of a file, what only type checkers see among them."""
    return ast.walk(ast.parse(path.read_text()))


def imports_of(path):
    """Modules of the package that a file imports."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("segcapture"):
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("segcapture.")}
    return found - {module_of(path)}


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_imports_go_one_way(path):
    """None knows those who call it; imports for type checkers are imports."""
    module = module_of(path)
    assert set(imports_of(path)) <= set(ORDER[: ORDER.index(module)])
    if module in ONLY:
        assert imports_of(path) <= ONLY[module]


def test_no_two_classes_share_a_name():
    """One word for one thing."""
    found = Counter(n.name for path in FILES for n in nodes_of(path) if isinstance(n, ast.ClassDef))
    assert [name for name, count in found.items() if count > 1] == []


def test_the_imports_have_no_cycle():
    """Of files, also within a folder."""
    dotted = {path: ".".join(("segcapture", *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES}
    graph = {}
    for path, name in dotted.items():
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.module]
        graph[name] = {node.module for node in nodes} & (set(dotted.values()) - {name})
    done = set()
    while graph.keys() - done:
        ready = {name for name in graph.keys() - done if graph[name] <= done}
        assert ready, f"a cycle among {sorted(graph.keys() - done)}"
        done |= ready


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_only_some_files_name_cuda(path):
    """Everything else would work with another kind of graph."""
    if path.parent.name == "cuda":
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "torch.cuda", f"line {node.lineno}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                assert not re.match(r"(torch\.cuda|cuda)(\.|$)", name), f"line {node.lineno}"


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

"""Every code block of the README runs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def run(block, environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        capture_output=True,
        text=True,
        env=environment,
        cwd=README.parent,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_on_the_cpu(number, monkeypatch):
    """Without a GPU."""
    import os

    run(BLOCKS[number], {**os.environ, "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.cuda
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_on_cuda(cuda, number):
    """On the GPU."""
    run(BLOCKS[number], None)


def test_the_readme_names_the_commands_that_ci_runs():
    """The test command of the README is the one of .ci/run."""
    ci = (README.parent / ".ci" / "run").read_text()
    assert "pytest -n auto" in ci
    assert "pytest -n auto" in README.read_text()
    assert len(BLOCKS) >= 2


def test_the_tables_of_figures_are_made_from_the_results():
    """No figure in the README was typed."""
    path = README.parent / "tests" / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    for made in (table.targets, table.boundary, table.decode, table.serving):
        assert made() in README.read_text(), made.__doc__

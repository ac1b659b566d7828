"""Every code block of the README runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(
    r"^```python\n(.*?)^```"  # and what it prints, if that comes before the next block
    r"(?:\n(?:(?!```).)*```text\n(.*?)^```)?",
    flags=re.MULTILINE | re.DOTALL,
)
FOUND = BLOCK.findall(README.read_text())
GOES_ON = "# The smallest example goes on."
BLOCKS = [FOUND[0][0] + block if block.startswith(GOES_ON) else block for block, _ in FOUND]
PRINTED = [text for _, text in FOUND]
"""What the README says that a block prints without a GPU; empty where it says nothing."""


def run(block, folder, environment):
    """What it prints as a file of its own, `model.py`."""
    (folder / "model.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "-W", "error", "model.py"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace(f"{folder.resolve()}{os.sep}", "").replace(f"{folder}{os.sep}", "")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_on_the_cpu(number, tmp_path):
    """Without a GPU. It prints what the README says."""
    found = run(BLOCKS[number], tmp_path, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    wanted = [line for line in PRINTED[number].splitlines() if line.strip() != "..."]
    lines = iter(found.splitlines())
    assert [line for line in wanted if line not in lines] == []


@pytest.mark.cuda
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_on_cuda(cuda, number, tmp_path):
    """On the GPU."""
    run(BLOCKS[number], tmp_path, os.environ)


def test_the_readme_shows_what_is_printed():
    """The expression above finds the blocks that are followed by their output."""
    assert [number for number, text in enumerate(PRINTED) if text] == [0, 1, 4, 5]


@pytest.mark.parametrize("folder", [".", "examples", "tests", "tests/benchmarks"])
def test_links_lead_to_files(folder):
    """Links of a README, and the programs that it names."""
    text = (ROOT / folder / "README.md").read_text()
    links = [ROOT / folder / link for link in re.findall(r"\]\(([^):]+)\)", text)]
    named = [ROOT / name for name in re.findall(r"`((?:examples|tests)/[\w/]+\.py)", text)]
    assert links or named
    assert [str(path) for path in [*links, *named] if not path.exists()] == []


def test_the_readme_names_the_commands_that_ci_runs():
    """The test command of the README is the one of .ci/run."""
    ci = (README.parent / ".ci" / "run").read_text()
    assert "pytest -n auto" in ci
    assert "pytest -n auto" in README.read_text()
    assert len(BLOCKS) >= 2


def test_the_tables_of_figures_are_made_from_the_results():
    """No figure in a README was typed."""
    path = ROOT / "tests" / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.speed() in README.read_text()
    for made in (table.targets, table.boundary, table.decode, table.serving):
        assert made() in (path.parent / "README.md").read_text(), made.__doc__

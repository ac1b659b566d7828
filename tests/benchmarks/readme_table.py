"""Tables of figures, made from the results: `python tests/benchmarks/readme_table.py`.

`speed` is in the project's README, all others are in the README of this folder.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SUBJECTS = ("replay_overhead", "writeback", "capture", "memory", "decode", "serving")


def results() -> dict[str, dict[str, Any]]:
    """What the newest runs wrote, by subject."""
    paths = [RESULTS / f"{subject}.json" for subject in SUBJECTS]
    return {path.stem: json.loads(path.read_text()) for path in paths if path.exists()}


SPEED = {
    "eager": ("eager",),
    "segcapture": (
        "segcapture, fresh tensors",
        "breaks at attention",
        "GraphedCallable, buckets (8, 16, 32, 64)",
    ),
    "breakable-cuda-graphs": ("breakable-cuda-graphs, into a buffer",),
    "one graph": ("torch.cuda.graph", "one graph, whole cache"),
    "torch.compile": ("torch.compile", "torch.compile, whole cache"),
}
"""Columns of `speed`, and the contenders that belong into each."""


def speed(size: str = "hidden 2048") -> str:
    """Tokens or requests per second: decoding and serving, all contenders side by side."""
    found = results()
    rows: dict[str, dict[str, float]] = {}
    for subject, key, prefix in (("decode", "tokens_per_s", "decoder, "), ("serving", "per_s", "")):
        for row in found.get(subject, {"rows": []})["rows"]:
            if key in row and (subject == "serving" or row["case"].startswith(size)):
                rows.setdefault(prefix + row["case"], {})[row["contender"]] = _median(row[key])
    lines = [f"| per second | {' | '.join(SPEED)} |", f"| --- |{' --- |' * len(SPEED)}"]
    for case, measured in rows.items():
        cells = [[f"{measured[c]:.0f}" for c in names if c in measured] for names in SPEED.values()]
        lines.append(f"| {case} | {' | '.join(cell[0] if cell else '' for cell in cells)} |")
    return "\n".join(lines)


def targets() -> str:
    """Each target with what was measured."""
    lines = ["| what | at most | measured | |", "| --- | --- | --- | --- |"]
    for found in results().values():
        for target in found["targets"]:
            value = target["value"]
            measured = "not measured" if value is None else f"{value:.3g}"
            verdict = "" if value is None else "met" if target["met"] else "missed"
            lines.append(f"| {target['what']} | {target['at_most']:.3g} | {measured} | {verdict} |")
    return "\n".join(lines)


def decode(size: str = "hidden 2048") -> str:
    """A decode step of one size: tokens per second, host and GPU time."""
    lines = ["| decoder | | tokens/s | host us | GPU us |", "| --- | --- | --- | --- | --- |"]
    for row in results().get("decode", {"rows": []})["rows"]:
        if "tokens_per_s" not in row or not row["case"].startswith(size):
            continue
        gpu = row.get("gpu_us")
        bound = "at most " if row.get("gpu_is_upper_bound") else ""
        lines.append(
            f"| {row['case']} | {row['contender']} | {_median(row['tokens_per_s']):.0f} | "
            f"{_median(row['host_us']):.0f} | {bound}{_median(gpu):.0f} |"
        )
    return "\n".join(lines)


def serving() -> str:
    """Served functions: requests or tokens per second, or the host time of a call. Empty until measured."""
    lines = ["| what | how | host us | per second |", "| --- | --- | --- | --- |"]
    found = results().get("serving")
    if found is None:
        return ""
    for row in found["rows"]:
        rate = f"{_median(row['per_s']):.0f}" if "per_s" in row else ""
        host = f"{_median(row['host_us']):.0f}" if "host_us" in row and not rate else ""
        if rate or host:
            lines.append(f"| {row['case']} | {row['contender']} | {host} | {rate} |")
    return "\n".join(lines)


def boundary() -> str:
    """Where the time of a boundary goes at capture."""
    lines = ["| one boundary, at capture | host us |", "| --- | --- |"]
    for row in results().get("capture", {"rows": []})["rows"]:
        if row["case"] == "one boundary":
            lines.append(f"| {row['contender']} | {_median(row['host_us']):.0f} |")
    return "\n".join(lines)


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


if __name__ == "__main__":
    print(speed(), targets(), boundary(), decode(), serving(), sep="\n\n")

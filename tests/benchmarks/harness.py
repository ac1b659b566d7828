"""What the benchmarks share: options, contenders that may fail, a table and JSON."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from report import environment, table, text_of
from timing import Call, Clock, Measured, interleaved

Factory = Callable[[], Call]
"""Builds a contender: what it returns is one replay, or one run of the work."""
Check = Callable[[str, Call], None]


@attrs.define
class Bench:
    """One script's run: what is measured, and what is printed and written at its end."""

    title: str
    device: torch.device
    small: bool
    json: Path | None
    rounds: int
    rows: list[dict[str, Any]] = attrs.field(factory=list)
    targets: list[dict[str, Any]] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)

    @classmethod
    def from_arguments(
        cls, title: str, argv: Sequence[str] | None, *more: tuple[str, dict[str, Any]]
    ) -> "tuple[Bench, argparse.Namespace]":
        """Parse the options of all scripts, and `more` of this one."""
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU: a smoke test")
        parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there too")
        parser.add_argument("--device", help="default: cuda, with --small cpu")
        parser.add_argument("--rounds", type=int, help="interleaved rounds (default 15, with --small 2)")
        for flag, settings in more:
            parser.add_argument(flag, **settings)
        options = parser.parse_args(argv)
        device = torch.device(options.device or ("cpu" if options.small else "cuda"))
        if device.type == "cuda":
            if not torch.cuda.is_available():
                parser.error("there is no CUDA device: try --small")
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)  # tiny operators: more threads only wait for each other
        rounds = options.rounds or (2 if options.small else 15)
        return cls(title, device, options.small, options.json, rounds), options

    @property
    def cuda(self) -> bool:
        """Whether contenders that need CUDA can run."""
        return self.device.type == "cuda"

    def sync(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def run(
        self,
        case: str,
        factories: Mapping[str, Factory],
        *,
        check: Check | None = None,
        calls: int = 5,
        burst: int = 1,
        host_only: bool = False,
        show_memory: bool = False,
        columns: Callable[[str, Measured], dict[str, Any]] = lambda name, measured: {},
    ) -> dict[str, Measured]:
        """Build all contenders, measure them in interleaved rounds, and add a row for each.

        `calls` samples are taken a round, of `burst` calls each for the host time. A contender that fails,
        in building, in `check(name, call)` or in a round, gets a row with its error.
        """
        built: dict[str, Call] = {}
        memory: dict[str, float] = {}
        for name, factory in factories.items():
            print(f"{case}: {name}", file=sys.stderr, flush=True)
            try:
                before = self._reserved_mib()
                call = factory()
                self.sync()
                memory[name] = self._reserved_mib() - before
                if check is not None:
                    check(name, call)
                built[name] = call
            except Exception as error:
                self.failed(case, name, error)
        gpu_too = self.cuda and not host_only
        clocks = {name: Clock(call, calls, burst, gpu_too, host_only) for name, call in built.items()}
        results = interleaved(
            clocks, self.rounds, lambda name, error: self.failed(case, name, error), collector=host_only
        )
        for name, measured in results.items():
            row: dict[str, Any] = {"host_us": measured.host_us}
            if measured.gpu_us is not None:
                row |= {
                    "gpu_us": measured.gpu_us,
                    "gpu_is_upper_bound": not measured.ahead,
                    "step_us": measured.step_us,
                    "bound": measured.bound,
                }
            if self.cuda and show_memory:
                row["build_reserved_mib"] = memory[name]
            self.add(case, name, **row, **columns(name, measured))
        return results

    def _reserved_mib(self) -> float:
        if not self.cuda:
            return 0.0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) / 2**20

    def add(self, case: str, contender: str, **columns: Any) -> None:
        """A row of the table."""
        self.rows.append({"case": case, "contender": contender, **columns})

    def failed(self, case: str, contender: str, error: BaseException | str) -> None:
        """A row that says why there are no numbers."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.add(case, contender, error=text)

    def target(self, what: str, value: float | None, at_most: float) -> None:
        """A number that a limit was set for; None where it could not be measured."""
        met = None if value is None else value <= at_most
        self.targets.append({"what": what, "value": value, "at_most": at_most, "met": met})

    def finish(self) -> int:
        """Print everything and write the JSON."""
        about = environment(self.device)
        print(f"# {self.title}\n")
        for key, value in about.items():
            print(f"{key}: {value}")
        print("\n" + table([_shown(row) for row in self.rows]))
        for row in self.rows:
            if "error" in row:
                print(f"\nfailed: {row['case']}, {row['contender']}: {row['error']}")
        if self.targets:
            print("\n" + table([{key: text_of(value) for key, value in t.items()} for t in self.targets]))
        for note in self.notes:
            print(f"\n{note}")
        if self.json is not None:
            self.json.parent.mkdir(parents=True, exist_ok=True)
            results = {
                "benchmark": self.title,
                "small": self.small,
                "rounds": self.rounds,
                "environment": about,
                "rows": self.rows,
                "targets": self.targets,
                "notes": self.notes,
            }
            self.json.write_text(json.dumps(results, indent=1, default=attrs.asdict) + "\n")
        return 0


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    shown = {key: text_of(value) for key, value in row.items() if key != "gpu_is_upper_bound"}
    if row.get("gpu_is_upper_bound"):
        shown["gpu_us"] = f"<= {shown['gpu_us']}"
    if "error" in row:
        shown["error"] = f"failed: {row['error'].splitlines()[0][:60]}" if row["error"] else "failed"
    return shown

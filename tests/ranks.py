"""Processes that stay, and run programs as the ranks of a process group of their own each time."""

import gc
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from segcapture import FrozenValueWarning
from tests.conftest import Backend

TIMEOUT = 60.0  # seconds for one program


class RanksFailedError(AssertionError):
    """Some rank raised, or did not end."""


class Ranks:
    """`size` processes with gloo on the CPU, or with NCCL on one GPU each."""

    def __init__(self, folder: Path, transport: str, size: int, mode: str | None = None) -> None:
        self.transport, self.size, self.mode = transport, size, mode
        self._folder = folder
        self._runs = 0
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, program: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call `program(backend, *args)` on every rank, in a new process group; what each returned.

        Raises:
            RanksFailedError: a rank raised, died, or did not end in time. All are started anew then.
        """
        if not self._processes:
            self._start()
        self._runs += 1
        store = self._folder / f"store{self._runs}"
        for pipe in self._pipes:
            pipe.send((program, args, str(store)))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            # After one failure the others may wait for that rank.
            if not pipe.poll(5.0 if failures else timeout):
                failures.append(f"rank {rank} did not end")
                continue
            try:
                result, failure = pipe.recv()
            except EOFError:
                result, failure = None, "died"
            results.append(result)
            if failure is not None:
                failures.append(f"rank {rank}: {failure}")
        if failures:
            self.close()
            raise RanksFailedError("\n".join(failures))
        return results

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self.transport, rank, self.size, self.mode), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(pipe: Any, transport: str, rank: int, size: int, mode: str | None) -> None:
    """Run one program after another."""
    warnings.simplefilter("error", FrozenValueWarning)
    torch.set_num_threads(1)
    backend = Backend("emulated", torch.device("cpu"), emulated=True)
    if transport == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        backend = Backend(transport, device, emulated=mode == "debug", mode=mode)
    while True:
        try:
            program, args, store = pipe.recv()
        except EOFError:
            return
        join(store, transport, rank, size)
        result, failure = None, None
        try:
            result = program(backend, *args)
        except BaseException:
            failure = traceback.format_exc()
        gc.collect()  # NCCL does not end while a graph with its kernels lives
        if failure is None and dist.is_initialized():
            dist.destroy_process_group()
        pipe.send((result, failure))


def join(store: str, transport: str, rank: int, size: int) -> None:
    """Make the process group."""
    dist.init_process_group(
        transport,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
        device_id=torch.device("cuda", rank) if transport == "nccl" else None,
    )

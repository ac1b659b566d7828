"""Programs whose breaks return odd things: owned by one, by many, by nobody. Right, or refused, never wrong.

`python -m tests.odd_programs FIRST LAST [--device cuda]` prints the outcome of each program as JSON, so that
two versions of the package can be compared.
"""

import argparse
import dataclasses
import json
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch

from segcapture import BreakableCUDAGraphCapture, CaptureFailedError, FrozenValueWarning, OutputMismatchError

SIZE = 8


class Two(NamedTuple):
    """A container."""

    one: Any
    two: Any


@dataclasses.dataclass
class Record:
    """A container."""

    one: Any
    two: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A container that does not take other items in the usual way."""

    one: Any
    two: Any


class Plain:
    """A container."""

    def __init__(self, one, two):
        self.one, self.two = one, two


class State:
    """What outlives a call of a program."""

    def __init__(self, device):
        self.device = device
        self.cache = torch.ones(SIZE, device=device)
        self.pair = [torch.zeros(SIZE, device=device), torch.zeros(SIZE, device=device)]
        self.host = np.ones(SIZE, dtype=np.float32)
        self.count = 0
        self.last = torch.zeros(SIZE, device=device)
        self.kept: dict[str, Any] = {}


# A leaf: from the state, a tensor of the capture, and a random source that is the same in each call.
LEAVES = {
    "new": lambda s, t, r: t * 2 + 1,
    "new slice": lambda s, t, r: torch.cat([t, t + 1])[3 : 3 + SIZE],
    "expanded": lambda s, t, r: (t[:1] * 3).expand(SIZE),
    "argument": lambda s, t, r: t,
    "view of argument": lambda s, t, r: t[1:],
    "cache": lambda s, t, r: s.cache.add_(t),
    "view of cache": lambda s, t, r: s.cache.add_(t)[2:],
    "ping-pong": lambda s, t, r: s.pair[s.count % 2].copy_(t + s.count),
    "none": lambda s, t, r: None,
    "number": lambda s, t, r: 3,
    "counter": lambda s, t, r: s.count,
    "no elements": lambda s, t, r: t[:0] * 2,
}


def remembered(s, t, r):
    s.last = t * 2 - 1
    return s.last


def remembered_view(s, t, r):
    s.last = torch.cat([t, t])
    return s.last[2 : 2 + SIZE]


def storage_kept(s, t, r):
    y = t * 4
    s.kept["storage"] = y.untyped_storage()
    return y


def of_numpy(s, t, r):
    if s.device.type != "cpu":
        return t + 5
    s.host += 1
    return torch.from_numpy(s.host)


def detached_kept(s, t, r):
    y = t * 5
    s.kept["detached"] = y.detach()
    return y


LEAVES |= {
    "remembered": remembered,
    "remembered view": remembered_view,
    "storage kept": storage_kept,
    "numpy": of_numpy,
    "detached kept": detached_kept,
}

CONTAINERS = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"one": a, "two": b},
    "ordered": lambda a, b: OrderedDict(one=a, two=b),
    "default": lambda a, b: defaultdict(list, one=a, two=b),
    "named": Two,
    "record": Record,
    "frozen": Frozen,
    "plain": Plain,
    "twice": lambda a, b: [a, a, b],
    "nested": lambda a, b: {"deep": [(a, {"two": b})]},
}


def items(value):
    """The tensors and plain values of an output, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, Record | Frozen | Plain):
        value = [value.one, value.two]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in items(item)]
    return [value]


def leaves(value):
    """The tensors of an output, in order."""
    return [item for item in items(value) if isinstance(item, torch.Tensor)]


def numbers(value):
    """The numbers of an output, in order."""
    return [float(item) for item in items(value) if isinstance(item, bool | int | float)]


class Program:
    """A random sequence of steps, the same for one seed."""

    def __init__(self, seed):
        r = random.Random(seed)
        self.seed = seed
        self.steps = []
        for _ in range(r.randint(1, 4)):
            kinds = [r.choice([*LEAVES]) for _ in range(2)]
            shape = r.choice(["bare", *CONTAINERS])
            owner = r.choice(["nobody", "nobody", "nobody", "state", "part"])
            after = r.choice(["add", "write", "write view", "read state", "pass", "pass item", "pass items"])
            self.steps.append((kinds, shape, owner, after))

    def __str__(self):
        return f"{self.seed}: {self.steps}"

    def make(self, s, t, step):
        """What the break of a step returns."""
        kinds, shape, owner, _ = step
        s.count += 1
        a = LEAVES[kinds[0]](s, t, None)
        if shape == "bare":
            return a
        out = CONTAINERS[shape](a, LEAVES[kinds[1]](s, t, None))
        if owner == "state":
            s.kept["out"] = out
        elif owner == "part":
            s.kept["part"] = (out[0] if isinstance(out, tuple | list) else getattr(out, "one", None),)
        return out

    def run(self, s, x, call):
        """One call; `call(fn, *args)` calls the function of a break."""
        t, results = x * 1, []
        for i, step in enumerate(self.steps):
            out = call(lambda t, step=step: self.make(s, t, step), t)
            found = leaves(out)
            found = [f for f in found if f.numel()]
            for f in found:
                results.append(f * 2 if f.shape == t.shape else f.sum() + t)
            after = step[3]
            if found and after == "write":
                found[0].add_(1) if not _repeats(found[0]) else None
            elif found and after == "write view":
                found[-1][1:].mul_(0.5) if not _repeats(found[-1]) else None
            if after == "read state":
                results.append(call(lambda t: self.look(s, t), t))
            elif after == "pass":
                results.append(
                    call(lambda t, out: t + sum([f.sum() for f in leaves(out)]) + sum(numbers(out)), t, out)
                )
            elif after == "pass item" and found:
                results.append(call(lambda t, f: t - f.sum(), t, found[0]))
            elif after == "pass items" and found:
                results.append(call(lambda t, fs: t - sum([f.sum() for f in fs]), t, tuple(found)))
            for f in found:
                results.append(f * 1)
            t = t * 0.5 + i + (found[0].sum() if found else 0) * 0.125
        return [*results, t * 1]

    def look(self, s, t):
        """A break that reads what earlier ones left in the state."""
        total = t + s.cache + s.last[:SIZE] + float(s.host.sum())
        for value in s.kept.values():
            if isinstance(value, torch.UntypedStorage):
                total = total + torch.empty(0, device=s.device).set_(value, 0, (SIZE,), (1,))
            else:
                total = total + sum([f.sum() for f in leaves(value)])
        return total


def total(t, out):
    """A break that reads an output, its numbers too."""
    return t + sum([f.sum() for f in leaves(out)]) + sum(numbers(out))


def _repeats(tensor):
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def outcome(seed, device, guard=torch.no_grad, **options):
    """`right`, `wrong: ...`, or what the program was refused with."""
    program, device = Program(seed), torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(SIZE, generator=generator).to(device) for _ in range(5)]
    eager, ours = State(device), State(device)

    def plain(fn, *args):
        return fn(*args)

    with guard(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = [[t.clone() for t in program.run(eager, x.clone(), plain)] for x in inputs]
        x = inputs[0].clone()
        program.run(ours, x, plain)
        x.copy_(inputs[1])
        g = BreakableCUDAGraphCapture(device=device, **options)
        try:
            with g:
                results = program.run(ours, x, g.add_eager)
            found = [t.clone() for t in results]
            for i in range(1, len(inputs)):
                if i > 1:
                    x.copy_(inputs[i])
                    g.replay()
                    found = [t.clone() for t in results]
                for k, (a, b) in enumerate(zip(found, expected[i], strict=True)):
                    if not torch.equal(a, b):
                        return f"wrong: call {i}, result {k}: {a.tolist()} for {b.tolist()}"
        except (CaptureFailedError, OutputMismatchError, FrozenValueWarning) as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
    return "right"


def main():
    """Print outcomes as JSON lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for seed in range(options.first, options.last):
        try:
            found = outcome(seed, options.device, [torch.no_grad, torch.inference_mode][seed % 4 == 3])
        except Exception as error:
            found = f"crash: {type(error).__name__}: {error}"[:400]
        print(json.dumps([seed, found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Programs of served functions with state: re-bound, counted, swapped, grown, written in place, anywhere.

`python -m tests.state_programs FIRST LAST` prints what becomes of each program.
"""

import random
import sys
import warnings

import torch

from segcapture import CaptureFailedError, OutputMismatchError, eager_break_during_capture
from tests.served import Nested, graphed

SIZE = 4
CALLS = 9


def new_state(device):
    """Objects in objects, lists and dicts of tensors and numbers."""

    def tensor(value):
        return torch.full((SIZE,), float(value), device=device)

    deep = Nested(h=tensor(1), pair=[tensor(2), tensor(3)], n=0)
    return Nested(
        a=tensor(1),
        b=tensor(2),
        n=0,
        kept=[tensor(1)],
        log=[],
        named={"k": tensor(4)},
        deep=[deep],
        last=None,
        lazy=None,
    )


def rebind(s, t):
    s.a = s.a * 0.5 + t
    return t + s.a


def rebind_deep(s, t):
    s.deep[0].h = s.deep[0].h * 0.5 + t
    return t - s.deep[0].h


def rebind_item(s, t):
    s.named["k"] = s.named["k"] + 1
    return t + s.named["k"]


def rebind_unread(s, t):
    s.last = t * 2
    return t + s.last


def previous(s, t):
    before, s.last = s.last, t * 1
    return t if before is None else t - before * 0.25


def swap(s, t):
    s.a, s.b = s.b, s.a
    return t + s.a


def swap_deep(s, t):
    s.deep[0].pair.reverse()
    return t + s.deep[0].pair[0] * 0.5


def count(s, t):
    s.n += 1
    return t * 1


def count_and_add(s, t):
    s.n += 1
    return t + s.n


def count_and_scale(s, t):
    s.deep[0].n += 2
    return t * (1 + 1 / s.deep[0].n)


def choose(s, t):
    s.n += 1
    return t + s.deep[0].pair[s.n % 2]


def grow(s, t):
    s.kept.append(t * 0.5)
    return t + sum(s.kept[1:], s.kept[0]) * 0.1


def grow_unread(s, t):
    s.log.append(len(s.log))
    return t * 1


def lazily(s, t):
    if s.lazy is None:
        s.lazy = t * 0 + 3
    return t * s.lazy * 0.5


def write(s, t):
    s.a.mul_(0.5).add_(t)
    return t + s.a


def write_deep(s, t):
    s.deep[0].h.add_(t)
    return t - s.deep[0].h * 0.1


def write_item(s, t):
    s.named["k"].copy_(t * 0.5)
    return t * 1


def read(s, t):
    return t + s.a * s.deep[0].pair[1] + s.named["k"]


def same_view(s, t):
    s.b = s.b.view(SIZE)
    return t + s.b


IN_PLACE = [write, write_deep, write_item, read, lazily, count, rebind_unread, grow_unread, same_view]
MOVING = [rebind, rebind_deep, rebind_item, previous, swap, swap_deep, count_and_add, count_and_scale, choose]
MOVING += [grow]


def replace_tensor(s):
    s.a = s.a * 3


def replace_deep(s):
    s.deep[0].h = s.deep[0].h + 1


def replace_object(s):
    s.deep[0] = Nested(**{**vars(s.deep[0]), "h": s.deep[0].h - 2})


def replace_item(s):
    s.named["k"] = s.named["k"] * 2


def write_between(s):
    s.a.add_(1)


OUTSIDE = [replace_tensor, replace_deep, replace_object, replace_item]


class StateProgram:
    """A random sequence of steps, each in a break or between them, and what is done between calls."""

    def __init__(self, seed, safe):
        r = random.Random(seed)
        self.steps = []
        for _ in range(r.randint(1, 5)):
            where = r.choice(["graph", "graph", "break", "passed"])
            if safe:
                own = where != "graph"
                step = r.choice(IN_PLACE + (MOVING if own else []))
                self.steps.append((step, "break" if own else where, own))
            else:
                self.steps.append((r.choice(IN_PLACE + MOVING), where, r.random() < 0.3))
        self.through = r.choice(["closure", "argument", "keyword"])
        self.warmup = r.choice([0, 1, 2, 2])
        between = [write_between] if safe else [write_between, None, r.choice(OUTSIDE)]
        self.between = {r.randint(0, CALLS): r.choice(between) for _ in range(2)}
        self.weights = r.choice(["raise", "recapture"])

    def __str__(self):
        steps = [(step.__name__, where, own) for step, where, own in self.steps]
        between = {at: f.__name__ for at, f in self.between.items() if f is not None}
        return f"{steps}, {self.through}, warmup={self.warmup}, {between}, {self.weights}"

    def run(self, s, own, x):
        """One call; breaks have a state of their own, or share that of the rest."""
        t = x * 1
        for step, where, apart in self.steps:
            state = own if apart else s
            if where == "graph":
                t = step(state, t)
            elif where == "break":
                t = self._in_break(step, state, t)
            else:
                t = self._passed(step, state, t, state.a, state.n)
            t = t.clamp(-100, 100) + 0.5
        return t * 2

    @staticmethod
    @eager_break_during_capture
    def _in_break(step, state, t):
        return step(state, t)

    @staticmethod
    @eager_break_during_capture
    def _passed(step, state, t, a, n):
        return step(state, t) + a * n


def outcome(seed, safe, device, mode=None):
    """`right` with the number of replays, `wrong: ...`, or what the program was refused with."""
    program = StateProgram(seed, safe)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, plain_own, ours, own = (new_state(device) for _ in range(4))
        options = {"warmup": program.warmup, "weights": program.weights, "device": device, "mode": mode}

        class Asked:  # for `graphed`, which takes a backend
            pass

        Asked.device, Asked.mode = device, mode
        del options["device"], options["mode"]
        if program.through == "closure":
            g = graphed(Asked, lambda x: program.run(ours, own, x), **options)
            call = g
        else:
            g = graphed(Asked, lambda x, state: program.run(state.s, state.own, x), **options)
            state = Nested(s=ours, own=own)  # objects in an object: they are no part of the signature

            def call(x):
                return g(x, state) if program.through == "argument" else g(x, state=state)

        for i in range(CALLS):
            x = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed * 100 + i)).to(device)
            if (action := program.between.get(i)) is not None:
                action(ours)
                action(plain)
            expected = program.run(plain, plain_own, x)
            try:
                found = call(x)
            except (CaptureFailedError, OutputMismatchError) as error:
                return f"{type(error).__name__}: {str(error)[:200]}"
            if not torch.equal(found, expected):
                return f"wrong: call {i}: {found.tolist()} for {expected.tolist()}"
            for path in ("a", "b"):
                if safe and not torch.equal(getattr(ours, path), getattr(plain, path)):
                    return f"wrong: {path} after call {i}"
        return f"right: {g.stats().replays} replays"


def main():
    """Print outcomes."""
    first, last = map(int, sys.argv[1:3])
    for seed in range(first, last):
        for safe in (False, True):
            print(seed, safe, outcome(seed, safe, torch.device("cpu")), StateProgram(seed, safe))


if __name__ == "__main__":
    main()

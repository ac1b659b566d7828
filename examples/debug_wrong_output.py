"""A replay that gives wrong output, and how `verify` finds the line.

The planted fault is a common one: `update_weights` binds a new parameter where it should copy into the one
that was captured. Eager code sees the new weights, the graph goes on reading the old memory, and nothing
fails. Runs on CUDA, or emulated on the CPU:

    python examples/debug_wrong_output.py [--plot timeline.png]
"""

import argparse
import sys

import torch
from torch import Tensor, nn

from segcapture import BreakableCUDAGraphCapture, CaptureStateError, eager_break_during_capture, find_breaks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Policy(nn.Module):
    """A small network; `clip` cannot be captured, since it reads a value on the host."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encode, self.act, self.value = (nn.Linear(width, width) for _ in range(3))

    @eager_break_during_capture
    def clip(self, h: Tensor, limit: float) -> Tensor:
        """Scale `h` down if its largest element is above the limit."""
        return h * min(1.0, limit / h.abs().max().item())

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [batch, width] to the same."""
        h = self.clip(self.encode(x).relu(), 2.0)
        h = self.clip(self.act(h).relu(), 1.0)
        return self.value(h)

    def update_weights(self, weight: Tensor, *, in_place: bool) -> None:
        """Take new weights from a trainer: rightly, or with the planted fault."""
        if in_place:
            self.act.weight.copy_(weight)
        else:
            self.act.weight = nn.Parameter(weight)


@torch.no_grad()
def main(plot: str | None) -> int:
    """Capture, break it, find the fault, mend it."""
    torch.manual_seed(0)
    policy, x = Policy().to(DEVICE), torch.randn(8, 64, device=DEVICE)
    new_weight = torch.randn(64, 64, device=DEVICE)

    print("1. Where to break:", find_breaks(policy, x))
    with BreakableCUDAGraphCapture(device=DEVICE, name="policy", check=True) as g:
        out = policy(x)
    print(f"\n2. What was captured:\n{g}\n\n3. Is it right?\n{g.verify(policy, x, outputs=out)}")

    policy.update_weights(new_weight, in_place=False)
    report = g.verify(policy, x, outputs=out)
    print(f"\n4. After new weights:\n{report}")
    try:
        g.replay()
    except CaptureStateError as error:
        print(f"\n5. check=True says at replay:\n{error}")

    g.reset()  # the mended program: capture again, and copy from now on
    with g:
        out = policy(x)
    policy.update_weights(new_weight * 0.5, in_place=True)
    mended = g.verify(policy, x, outputs=out)
    print(
        f"\n6. Mended:\n{mended}\n\n7. Where the time goes:\n{g.profile()}\n\n8. Memory:\n{g.memory_report()}"
    )
    if plot:
        g.profile().plot(plot)
    found = report.difference is not None and report.difference.location.startswith(__file__)
    return 0 if found and mended else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="PATH", help="write the timeline of one replay (needs matplotlib)")
    sys.exit(main(parser.parse_args().plot))

"""A decision that the host makes in the middle of a model: one eager break between two graph segments.

`choose_expert` reads a value with `.item()` and branches on it, which no CUDA graph can hold. Marked as an
eager break it runs on the host at each replay; all around it is captured. Runs on CUDA, or emulated on the
CPU:

    python examples/quickstart.py
"""

import sys

import torch
from torch import Tensor, nn

from segcapture import BreakableCUDAGraphCapture, eager_break_during_capture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class RoutedModel(nn.Module):
    """Encodes a batch, sends it through one of two experts, and decodes it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.large = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.small = nn.Linear(width, width)
        self.decode = nn.Linear(width, width)
        self.chosen = ""

    @eager_break_during_capture
    def choose_expert(self, hidden: Tensor, energy: Tensor) -> Tensor:
        """The large expert for batches of high energy. Each replay decides anew."""
        self.chosen = "large" if energy.item() > 1.0 else "small"
        return self.large(hidden) if self.chosen == "large" else self.small(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [batch, width] to the same."""
        hidden = self.encode(x)
        return self.decode(hidden + self.choose_expert(hidden, x.square().mean()))


@torch.inference_mode()
def main() -> int:
    """Capture once, then replay on new inputs."""
    torch.manual_seed(0)
    model = RoutedModel().to(DEVICE)
    static_x = torch.zeros(8, 64, device=DEVICE)

    model(static_x)  # warm-up
    with BreakableCUDAGraphCapture(device=DEVICE) as g:
        out = model(static_x)
    print(g.describe(), "\n")

    all_equal = True
    for scale in (0.5, 2.0, 0.9):
        x = scale * torch.randn(8, 64, device=DEVICE)
        static_x.copy_(x)
        g.replay()
        chosen = model.chosen
        equal = torch.equal(out, model(x))
        all_equal &= equal
        print(f"input scaled by {scale}: {chosen} expert, {'equal to' if equal else 'NOT EQUAL to'} eager")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())

"""A whole training step in one capture, with a layer in it that cannot be captured.

`KeepLargest` reads a count on the host, forward and backward. As the two halves of a
`torch.autograd.Function`, both marked as eager breaks, it is differentiable and everything around it is
captured: forward, loss, backward and optimizer. Compares losses and weights with eager training. Runs on
CUDA, or emulated on the CPU: python examples/train_step.py
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from segcapture import BreakableCUDAGraphCapture, eager_break_during_capture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 20


@eager_break_during_capture
def keep_largest(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Zero all but the `count` largest of each row; also the mask. `topk` takes a number of the host."""
    chosen = x.topk(int(count), dim=1).indices
    mask = torch.zeros_like(x).scatter_(1, chosen, 1.0)
    return x * mask, mask


@eager_break_during_capture
def keep_largest_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """The gradient goes where the values went, scaled to the same length for every count."""
    return grad * mask * (mask.numel() / max(1, int(mask.sum())))


class KeepLargest(torch.autograd.Function):
    """An eager layer: a break is opaque to autograd, so each half is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        """Float [batch, width] to the same."""
        out, mask = keep_largest(x, count)
        ctx.save_for_backward(mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Called on the capturing thread, so that its break is seen."""
        return keep_largest_backward(grad, *ctx.saved_tensors), None


class Training:
    """A small model, its optimizer, and static tensors for a batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.encode = nn.Sequential(nn.Linear(16, 64), nn.Tanh()).to(DEVICE)
        self.decode = nn.Linear(64, 1).to(DEVICE)
        self.parameters = [*self.encode.parameters(), *self.decode.parameters()]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.02, momentum=0.9)
        self.x, self.y = torch.zeros(32, 16, device=DEVICE), torch.zeros(32, 1, device=DEVICE)
        self.count = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def load(self, number: int) -> None:
        """Batch `number`, and how many units it may use."""
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(32, 16, generator=generator)
        self.x.copy_(x)
        self.y.copy_(x.square().mean(dim=1, keepdim=True))
        self.count.fill_(8 + number % 32)

    def step(self) -> Tensor:
        """Forward, loss, backward, optimizer; returns the loss, a float []."""
        hidden = KeepLargest.apply(self.encode(self.x), self.count)
        loss = (self.decode(hidden) - self.y).square().mean()
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main() -> int:
    """Train eagerly, and by replaying one captured step."""
    eager, graphed = Training(), Training()
    expected = []
    for number in range(STEPS):
        eager.load(number)
        expected.append(eager.step().item())

    graphed.load(0)
    found = [graphed.step().item()]  # the first step is the warm-up: it makes the momentum buffers
    graphed.load(1)
    with BreakableCUDAGraphCapture(device=DEVICE, name="training step") as g:
        loss = graphed.step()  # and the second is captured while it runs
    found.append(loss.item())
    for number in range(2, STEPS):
        graphed.load(number)
        g.replay()
        found.append(loss.item())

    print(g.describe())
    print(f"\nloss of the first and the last step: {found[0]:.4f}, {found[-1]:.4f}")
    pairs = zip(eager.parameters, graphed.parameters, strict=True)
    equal = found == expected and all(torch.equal(a, b) for a, b in pairs)
    print(f"losses and weights {'equal to' if equal else 'NOT EQUAL to'} eager's after {STEPS} steps")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

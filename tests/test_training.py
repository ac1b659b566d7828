"""A whole training step in one capture, with breaks (C12)."""

import pytest
import torch

from segcapture import eager_break_during_capture


def net(backend):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(
        backend.device
    )


@eager_break_during_capture
def eager_forward(x):
    """Reads on the host."""
    return x * (1 + 0 * x.sum().item())


@eager_break_during_capture
def eager_backward(grad):
    """Reads on the host."""
    return grad * (1 + 0 * grad.sum().item())


class EagerLayer(torch.autograd.Function):
    """The way to make an eager layer differentiable."""

    @staticmethod
    def forward(ctx, x):
        return eager_forward(x)

    @staticmethod
    def backward(ctx, grad):
        return eager_backward(grad)


def step(model, optimizer, x, y, between):
    """Forward, loss, backward, optimizer; a break between forward and backward if asked."""
    hidden = EagerLayer.apply(model[:2](x)) if "layer" in between else model[:2](x)
    loss = (model[2](hidden) - y).square().mean()
    if "middle" in between:
        log_loss(loss.detach())
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    if "optimizer" in between:
        clip([p.grad for p in model.parameters()])
    optimizer.step()
    return loss.detach()


LOG = []


@eager_break_during_capture
def log_loss(loss):
    """A host read between forward and backward."""
    LOG.append(loss.item())


@eager_break_during_capture
def clip(grads):
    """A host decision between backward and the optimizer."""
    if max(g.abs().max().item() for g in grads) > 1e-3:
        for g in grads:
            g.mul_(0.5)


def test_an_object_with_parameters_is_passed_as_itself(backend):
    """An optimizer, with grad enabled: its parameters are no arguments."""
    model = net(backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    step_in_break = eager_break_during_capture(lambda optimizer: optimizer.step() and None, name="step")
    with backend.capture() as g:
        step_in_break(optimizer)
    g.replay()
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach(), value - 0.5 - 0.5)


@pytest.mark.parametrize(
    "between", [(), ("middle",), ("layer",), ("optimizer",), ("middle", "layer", "optimizer")]
)
def test_ten_steps_equal_eagers(backend, between):
    """Losses, gradients and weights, bit by bit."""
    generator = torch.Generator().manual_seed(1)
    data = [
        (
            torch.randn(4, 8, generator=generator).to(backend.device),
            torch.randn(4, 1, generator=generator).to(backend.device),
        )
        for _ in range(10)
    ]

    def prepare():
        model = net(backend)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = prepare()
    step(model, optimizer, *data[0], between)  # warm-up: momentum buffers
    expected = [step(model, optimizer, x, y, between) for x, y in data]
    weights = [p.detach().clone() for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]

    model, optimizer = prepare()
    step(model, optimizer, *data[0], between)
    x, y = data[0][0].clone(), data[0][1].clone()
    multithreaded = torch.autograd.is_multithreading_enabled()
    with backend.capture() as g:
        loss = step(model, optimizer, x, y, between)
    assert torch.autograd.is_multithreading_enabled() == multithreaded
    assert g.num_eager_breaks == ("middle" in between) + 2 * ("layer" in between) + ("optimizer" in between)
    found = [loss.clone()]
    for next_x, next_y in data[1:]:
        x.copy_(next_x)
        y.copy_(next_y)
        g.replay()
        found.append(loss.clone())
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    for p, weight, grad in zip(model.parameters(), weights, grads, strict=True):
        assert torch.equal(p.detach(), weight)
        assert torch.equal(p.grad, grad)


def test_mixed_precision_with_a_gradient_scaler(backend):
    """Ten steps, two of which overflow and are skipped: losses, scales and weights equal eager's."""
    kind = backend.device.type
    dtype = torch.bfloat16 if kind == "cpu" else torch.float16
    data = [(backend.tensor(4, 8, seed=i), backend.tensor(4, 1, seed=i + 50)) for i in range(10)]
    for skipped in (3, 7):
        data[skipped][0][0, 0] = torch.inf

    def prepare():
        model = net(backend)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=2)

        @eager_break_during_capture
        def scaled_optimizer_step():
            scaler.step(optimizer)  # asks on the host whether a gradient is infinite
            scaler.update()

        def step(x, y):
            with torch.autocast(kind, dtype=dtype):
                loss = (model(x) - y).float().square().mean()
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(loss).backward()
            scaled_optimizer_step()
            return loss.detach()

        return model, scaler, step

    model, scaler, step = prepare()
    expected = [(step(x, y), scaler.get_scale()) for x, y in data]
    assert expected[3][1] < expected[2][1] > 1024.0  # it grew, and shrank at the first that overflowed
    weights = [p.detach().clone() for p in model.parameters()]

    model, scaler, step = prepare()
    x, y = data[0][0].clone(), data[0][1].clone()
    found = [(step(x, y), scaler.get_scale())]  # warm-up: the scale, momentum buffers
    x.copy_(data[1][0])
    y.copy_(data[1][1])
    with backend.capture() as g:
        loss = step(x, y)
    assert g.num_eager_breaks == 1
    found.append((loss.clone(), scaler.get_scale()))
    for next_x, next_y in data[2:]:
        x.copy_(next_x)
        y.copy_(next_y)
        g.replay()
        found.append((loss.clone(), scaler.get_scale()))
    for (a, scale), (b, expected_scale) in zip(found, expected, strict=True):
        assert torch.equal(a, b) or (a.isnan() and b.isnan())
        assert scale == expected_scale
    for p, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p.detach(), weight)

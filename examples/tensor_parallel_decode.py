"""The decoder of decode_loop.py split over processes: one per GPU with NCCL, or on CPUs with gloo.

Each rank keeps some of the heads and a part of each MLP, and two all-reduces a layer add the parts up: in
graph segments, or as eager segments of their own (`--collectives eager`, or both). The tokens are compared
with those of the unsplit model: torchrun --nproc-per-node 2 examples/tensor_parallel_decode.py
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from decode_loop import CUDA, DEVICE, NAMES, SIZES, Decoder, decode, now
from torch import Tensor, nn

from segcapture import BreakableCUDAGraphCapture, check_same_segments

BREAK_ON = {"captured": [], "eager": ["c10d::*"]}


class RowParallel(nn.Module):
    """A linear whose input is split: each rank multiplies its part, and the products are added up."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """float [batch, in / ranks] to [batch, out], the same on all ranks."""
        out = F.linear(x, self.weight)
        dist.all_reduce(out)
        return out


def split(model: Decoder) -> None:
    """Keep this rank's outputs of `qkv` and `gate_up`, and the inputs of `o` and `down` that they feed."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for layer in model.layers:
        heads = [n * layer.dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
        for linear, sections in ((layer.qkv, heads), (layer.gate_up, layer.gate_up.out_features // 2)):
            parts = [rows.chunk(ranks)[rank] for rows in linear.weight.split(sections)]
            linear.weight = nn.Parameter(torch.cat(parts))
        layer.o = RowParallel(layer.o.weight.chunk(ranks, dim=1)[rank].contiguous())
        layer.down = RowParallel(layer.down.weight.chunk(ranks, dim=1)[rank].contiguous())
        layer.heads, layer.kv_heads = layer.heads // ranks, layer.kv_heads // ranks
        layer.cache = layer.cache.chunk(ranks, dim=1)[rank].clone()  # any part: it is overwritten


def host_time(run: Callable[[], None], position: Tensor, count: int) -> float:
    """Milliseconds until an idle GPU has been given all the work of a step: the median of all steps."""
    position.zero_()
    times = []
    for _ in range(count):
        start = now()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def parse(ranks: int) -> argparse.Namespace:
    """The sizes of decode_loop.py, checked for this number of ranks."""
    parser = argparse.ArgumentParser()
    for name, default in zip(NAMES, SIZES, strict=True):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--collectives", nargs="+", choices=BREAK_ON, default=["captured"])
    a = parser.parse_args()
    if not ranks:
        parser.error("start it with torchrun --nproc-per-node N")
    if a.kv_heads % ranks or a.heads % a.kv_heads or 3 * a.hidden % ranks:
        parser.error(f"{ranks} ranks must divide kv-heads and 3 * hidden, and kv-heads divide heads")
    if a.tokens > a.max_len or a.hidden % (2 * a.heads):
        parser.error("tokens must fit max-len, and 2 * heads divide hidden")
    return a


@torch.inference_mode()
def main() -> int:
    """Decode unsplit, then split: eagerly, and by replaying each capture that was asked for."""
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    a = parse(ranks)
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)  # every rank makes the whole model, and then keeps its part
    with torch.device(DEVICE):
        model = Decoder(a)  # float32: the parts of a bfloat16 sum would round to other tokens
        tokens, position = torch.zeros(a.batch, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    expected, _ = decode(lambda: model(tokens, position), tokens, position, a.tokens)
    split(model)

    different, lines = 0, []

    def check(name: str, run: Callable[[], None]) -> None:
        nonlocal different
        for layer in model.layers:
            layer.cache.zero_()  # nothing of an earlier run may help this one
        found, rate = decode(run, tokens, position, a.tokens)
        different += int((found != expected).sum())
        lines.append(f"{name:21} {rate:8.1f} tokens/s  {host_time(run, position, a.tokens):8.3f} ms of host")

    decode(lambda: model(tokens, position), tokens, position, a.tokens)  # the warm-up, of NCCL too
    check("eager", lambda: model(tokens, position))
    for collectives in a.collectives:
        position.zero_()  # a capture is a real step, and here is room for it in the cache
        with BreakableCUDAGraphCapture(device=DEVICE, name=collectives, break_on=BREAK_ON[collectives]) as g:
            model(tokens, position)
        check_same_segments(g)
        lines.append(g.describe().splitlines()[0])
        check(f"{collectives} collectives", g.replay)
        g.reset()  # NCCL does not end while a graph with its kernels lives

    if dist.get_rank() == 0:
        print(*lines, sep="\n")
    if dist.get_rank() == 0 or different:
        same = "the same tokens" if not different else f"{different} DIFFERENT TOKENS"
        print(f"{same} on {ranks} ranks as on one")
    if not CUDA:
        time.sleep(0.1)  # for gloo's threads to drop their last tensors: while Python ends, that aborts it
    dist.destroy_process_group()
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())

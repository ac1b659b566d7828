"""Real models: a Llama with a static cache, and a BERT encoder, both by Hugging Face, unedited."""

import inspect

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, StaticCache

from tests.conftest import assert_same

SDPA = "aten::scaled_dot_product_attention"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 64

pytestmark = [
    pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=lambda g: g.__name__),
    pytest.mark.parametrize(
        ("attention", "break_on", "kinds"),
        [("sdpa", [], "g"), ("sdpa", [SDPA], "gegeg"), ("eager", [], "g"), ("eager", ["*softmax*"], "gegeg")],
    ),
]


class Decoder:
    """One decoding step on static tensors, and a cache that advances by itself."""

    def __init__(self, model, device, prompt):
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=32)
        self.ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=device)
        # The argument's name before and after transformers 5.20 or so.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._with_cache_position = "cache_position" in names
        positions = torch.arange(prompt.shape[1], device=device)
        self.feed(self.run(prompt, positions[None]), prompt.shape[1])

    def run(self, ids, position):
        """The logits of the last token."""
        options = {self._cache_name: self.cache, "use_cache": True}
        if self._with_cache_position:
            options["cache_position"] = position[0]
        return self.model(input_ids=ids, position_ids=position, **options).logits[:, -1]

    def step(self):
        """One step on the static tensors."""
        return self.run(self.ids, self.position)

    def feed(self, logits, position):
        """The next token, chosen greedily, to the static inputs."""
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        self.position.fill_(position)


def test_llama_decodes_as_eager_does(backend, guard, attention, break_on, kinds):
    """Eight tokens after a prompt: the same logits, bit by bit, and the same cache."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, attn_implementation=attention, **SIZES)
    model = LlamaForCausalLM(config).eval().to(backend.device)
    prompt = torch.tensor([[3, 1, 4, 1, 5]], device=backend.device)
    with guard():
        Decoder(model, backend.device, prompt).step()  # warm-up
        eager, replayed = (Decoder(model, backend.device, prompt) for _ in range(2))
        if backend.name == "cuda" and attention == "eager":
            # Its mask is made from a number on the host; the tape cannot tell that from a constant.
            with pytest.raises(RuntimeError, match="pinned"), backend.capture(break_on=break_on):
                replayed.step()
            return
        with backend.capture(break_on=break_on) as g:
            out = replayed.step()
        assert "".join(segment.kind[0] for segment in g.segments) == kinds
        for position in range(6, 14):
            expected = eager.step()
            assert_same(out, expected, f"before position {position}")
            eager.feed(expected, position)
            replayed.feed(out, position)
            assert_same(replayed.ids, eager.ids)
            g.replay()
        assert_same(
            [(layer.keys, layer.values) for layer in replayed.cache.layers],
            [(layer.keys, layer.values) for layer in _advanced(eager).layers],
        )


def _advanced(decoder):
    decoder.step()
    return decoder.cache


def test_bert_encodes_as_eager_does(backend, guard, attention, break_on, kinds):
    """Padded batches: fresh tokens and fresh masks.

    The mask has four dimensions already: from one of two, transformers reads on the host whether it
    masks anything, but for a stream of CUDA that captures.
    """
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, attn_implementation=attention, **SIZES)
    model = BertModel(config).eval().to(backend.device)
    lowest = torch.finfo(torch.float32).min

    def encode(ids, lengths):
        padding = torch.arange(ids.shape[1], device=ids.device) > lengths[:, None]
        mask = torch.zeros(padding.shape, device=ids.device).masked_fill(padding, lowest)
        return tuple(model(input_ids=ids, attention_mask=mask[:, None, None, :].expand(-1, 1, 8, 8)).values())

    ids = torch.randint(0, VOCABULARY, (2, 8), device=backend.device)
    backend.check(
        encode, [ids, torch.tensor([5, 2], device=backend.device)], kinds, guard=guard, break_on=break_on
    )

"""A tiny GPT-2 and its tokenizer, and trainers that keep their batches."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra language")


class Recording:
    """Keeps the batches that a training by the next class uses."""

    batches = ()

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.batches = [*self.batches, copy.deepcopy(dict(inputs))]
        return super().compute_loss(model, inputs, *args, **kwargs)


def gpt2(vocabulary: int, layers: int = 1, positions: int = 512, width: int = 16):
    """Without dropout; always the same weights."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=vocabulary, n_positions=positions, n_embd=width)
    sizes |= dict(n_layer=layers, n_head=2)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **ends))


def make_tokenizer():
    """Of bytes; the end of a text and padding are 0."""
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["1 + 1 = 2"], 270, special_tokens=["<|end|>"], show_progress=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )

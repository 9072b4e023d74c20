"""Text of the language benchmarks, and the memory that is measured, with a tiny GPT-2."""

import json

import language_training as training
import pytest
import torch
from language_memory import measure
from safetensors.torch import load_file
from toy_language import gpt2

WORDS = {"en": "the cat and the dog ", "de": "die Katze, der Hund ", "fr": "le chat, le chien "}


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """The file of tokens, which are few."""
    monkeypatch.setattr(training, "VOCABULARY", 270)
    for name, words in WORDS.items():
        for part, repeats in (("train", 40), ("valid", 8), ("test", 8)):
            file = tmp_path / name / f"{part}.jsonl"
            file.parent.mkdir(exist_ok=True)
            rows = [{"page": str(i), "text": words * repeats + "é"} for i in range(3)]
            file.write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return training.tokenized(tmp_path)


def test_every_byte_belongs_to_one_token(tokens):
    found = load_file(tokens)
    text = WORDS["fr"] * 8 + "é"
    assert int(found["bytes"][found["fr/test"].long()].sum()) == 3 * len(text.encode())
    assert (found["fr/test"] == 0).sum() == 3  # a mark before each page
    assert training.tokenized(tokens.parent) == tokens


def test_covon_keeps_five_tensors_of_the_trained_weights():
    peft = pytest.importorskip("peft", reason="needs the extra language")
    whole = gpt2(8000, 2, 32, width=384)
    sizes = [p.numel() for p in whole.parameters()]
    largest = max(sizes) / sum(sizes)
    found = measure(whole)
    assert 4.9 < found["kept"] < 5.1
    assert found["end of task"] < largest
    assert found["posterior"] < 2.1 + largest  # the result, and a parameter more for a moment
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"])
    assert 4.9 < measure(peft.get_peft_model(whole, lora))["kept"] < 5.1


@pytest.mark.parametrize(
    ("method", "dtype", "kept"),
    [
        ("AdamW", torch.float32, 2.0),
        ("Ada-Reg", torch.float32, 4.0),  # an anchor has a mean and a precision
        ("EWC*", torch.float32, 4.0),
        ("CoVON, bfloat16 prior", torch.float32, 4.0),
        ("CoVON, bfloat16 prior", torch.bfloat16, 4.5),
    ],
)
def test_what_methods_keep(method, dtype, kept):
    found = measure(gpt2(1000, 2, 32, width=128).to(dtype), method)
    assert found["kept"] == pytest.approx(kept, abs=0.01)

"""What CoVON keeps beside a GPT-2 of 124 million parameters, trained whole or through LoRA.

    python benchmarks/language_memory.py            measure (4 GB of memory), then report
    python benchmarks/language_memory.py --report   from stored results only

Bytes of all tensors that exist between two steps of the second task are counted; gradients and
activations, which every optimizer needs, are not. The result goes to
``benchmarks/results/language/memory.json``, the table to ``docs/language.md``.
"""

from __future__ import annotations

import gc
import json

import pandas as pd
import torch
from comparison import RESULTS, ROOT, Case, arguments, replace_part, write_measurement
from torch import Tensor, nn

from covon_avalanche import CoVON
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/language_memory.py"
STORED = RESULTS / "language/memory.json"


def live_bytes() -> dict[int, int]:
    """Bytes of the storages of all tensors that exist, by address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def measure(model: nn.Module) -> Case:
    """Train two tasks for two steps each, and count what was added to the model."""
    before = sum(live_bytes().values())
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = CoVON(trained, ess=1e10, batch_size=1, prior_mean="init")
    ids = torch.randint(100, (1, 8))
    for task in range(2):
        for _ in range(2):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        if task == 0:
            optimizer.consolidate()
    optimizer.zero_grad()
    del ids
    added = sum(live_bytes().values()) - before
    weights = sum(p.nbytes for _, p in trained)
    return {"trained": weights // 4, "added": added, "tensors": added / weights}


def make_models() -> dict[str, nn.Module]:
    """GPT-2 small with random weights, whole and with LoRA adapters of rank 16."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    lora = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=["c_attn"], fan_in_fan_out=True)
    models = {"all weights": GPT2LMHeadModel(GPT2Config())}
    models["LoRA, rank 16"] = get_peft_model(GPT2LMHeadModel(GPT2Config()), lora)
    return models


def main() -> None:
    """Measure and report."""
    if not arguments(__doc__).report:
        models = make_models()
        write_measurement(STORED, [{"case": name, **measure(m)} for name, m in models.items()])
    rows = json.loads(STORED.read_text(encoding="utf-8"))["rows"]
    table = pd.DataFrame(
        {
            "trained": row["case"],
            "parameters trained": f"{row['trained']:,}",
            "CoVON keeps, MB": f"{row['added'] / 1e6:,.1f}",
            "in units of the trained weights": f"{row['tensors']:.2f}",
        }
        for row in rows
    )
    replace_part(ROOT / "docs/language.md", NAME, aligned(table))


if __name__ == "__main__":
    main()

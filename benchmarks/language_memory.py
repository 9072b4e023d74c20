"""What optimizers keep beside a GPT-2 of 124 million parameters, and their peaks of memory.

    python benchmarks/language_memory.py            measure (6 GB of memory), then report
    python benchmarks/language_memory.py --report   from stored results only

Bytes of all tensors that exist between two steps of the second task are counted, and by how much
they grow for a moment when the task ends, and in ``optimizer.posterior()``, whose result has two
tensors. Gradients and activations, which every optimizer needs, are not counted. The result goes to
``benchmarks/results/language/memory.json``, the table to ``docs/language.md``.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch
from comparison import RESULTS, ROOT, Case, arguments, replace_part, write_measurement
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from covon_avalanche import CoVON
from covon_avalanche.optim.quadratic_anchor import QuadraticAnchor, adam_second_moments
from covon_avalanche.report.tables import aligned

NAME = "benchmarks/language_memory.py"
STORED = RESULTS / "language/memory.json"
MODELS = {"GPT-2": 0.124e9, "Qwen3-1.7B": 1.72e9, "a model of 8 billion": 8e9}


class LiveMemory(TorchDispatchMode):
    """Context manager that counts the bytes of tensors: of some that exist, and of all that are
    made inside of it."""

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}  # by address of the storage
        for tensor in existing:
            self._count(tensor.untyped_storage())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage._cdata)
        if known is None or not known.alive:
            self._known[storage._cdata] = weakref.finalize(storage, self._add, -storage.nbytes())
            self._add(storage.nbytes())

    def _add(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def growth(self, function: Callable[[], object]) -> int:
        """Bytes by which a call exceeds what exists before it."""
        gc.collect()
        before = self.peak = self.bytes
        function()
        return self.peak - before


def squared_gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """EWC*'s importance, of one batch."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    found = {name: p.grad.square() for name, p in named}
    model.zero_grad()
    return found


def measure(model: nn.Module, method: str = "CoVON") -> Case:
    """Train two tasks for two steps each, and count what was added to the model."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    weights = sum(4 * p.numel() for _, p in trained)  # bytes in float32
    weights_dtype = str(trained[0][1].dtype).removeprefix("torch.")
    ids = torch.randint(100, (1, 8))
    anchor = QuadraticAnchor(trained, ess=1e3, strength=1.0)
    is_covon = method == "CoVON"

    def end_task() -> None:
        if is_covon:
            optimizer.consolidate()
        elif method == "EWC*":
            anchor.add(squared_gradients(model, ids))
        elif method == "Ada-Reg":
            anchor.add(adam_second_moments(trained, optimizer))

    with LiveMemory(model.parameters()) as live:
        before = live.bytes
        make: Any = CoVON.finetuning if is_covon else torch.optim.AdamW
        optimizer = make(trained, lr=1e-4)
        for task in range(2):
            with anchor.pulling(optimizer) if method in ("EWC*", "Ada-Reg") else nullcontext():
                for _ in range(2):
                    with optimizer.sampled_params() if is_covon else nullcontext():
                        optimizer.zero_grad()
                        model(input_ids=ids, labels=ids).loss.backward()
                    optimizer.step()
            optimizer.zero_grad()
            if task == 0:
                end_task()
        gc.collect()
        sizes = {"kept": live.bytes - before}
        if is_covon:
            sizes["posterior"] = live.growth(optimizer.posterior)
        sizes["end of task"] = live.growth(end_task)
    found: Case = {key: size / weights for key, size in sizes.items()}
    return {"method": method, "weights": weights_dtype, "trained": weights // 4, **found}


def make_model(lora: bool = False) -> nn.Module:
    """GPT-2 small with random weights, whole or with LoRA adapters of rank 16."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    settings = dict(task_type="CAUSAL_LM", r=16, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(model, LoraConfig(**settings)) if lora else model


def per_card(rows: list[Case]) -> pd.DataFrame:
    """GB per card for float32 weights, their gradients and what an optimizer keeps, sharded evenly;
    and the smallest card of 24 or 80 GB that has as much."""
    kept = {row["method"]: row["kept"] for row in reversed(rows) if row["weights"] == "float32"}
    found = []
    for model, parameters in MODELS.items():
        for method in ("AdamW", "CoVON"):
            row = {"model": model, "method": method}
            for cards in (1, 4, 8):
                size = 4e-9 * parameters * (2 + kept[method]) / cards
                card = next((f" (card of {s} GB)" for s in (24, 80) if size < s), "")
                row[f"{cards} card{'s'[: cards - 1]}"] = f"{size:.1f} GB{card}"
            found.append(row)
    return pd.DataFrame(found)


def main() -> None:
    """Measure and report."""
    if not arguments(__doc__).report:
        rows = [measure(make_model(), method) for method in ("AdamW", "Ada-Reg", "EWC*", "CoVON")]
        rows += [measure(make_model().bfloat16()), measure(make_model(lora=True))]
        write_measurement(STORED, rows)
    rows = json.loads(STORED.read_text(encoding="utf-8"))["rows"]
    table = pd.DataFrame(
        {
            "method": row["method"],
            "weights": row["weights"],
            "parameters trained": f"{row['trained']:,}",
            "kept, MB": f"{row['kept'] * row['trained'] * 4e-6:,.1f}",
            "kept": f"{row['kept']:.2f}",
            "end of a task": f"+{row['end of task']:.2f}",
            "posterior()": f"+{row['posterior']:.2f}" if "posterior" in row else "",
        }
        for row in rows
    )
    replace_part(ROOT / "docs/language.md", NAME, aligned(table))
    replace_part(ROOT / "docs/language.md", f"{NAME}, cards", aligned(per_card(rows)))


if __name__ == "__main__":
    main()

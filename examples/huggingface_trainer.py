"""CoVON in Hugging Face's Trainer: a tiny GPT-2 learns two alphabets, one after the other.

    pip install -e '.[language]'
    python examples/huggingface_trainer.py

The three lines that differ from a script with AdamW are marked.
"""

import tempfile

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from covon_avalanche import CoVON
from covon_avalanche.integrations.huggingface import PosteriorCallback

set_seed(0)


def counting(step: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count modulo 30 in steps."""
    starts = torch.arange(30).repeat(8)[:, None]
    rows = (starts + step * torch.arange(16)) % 30
    return [{"input_ids": row, "labels": row} for row in rows]


corpora = {"by ones": counting(1), "by sevens": counting(7)}
config = GPT2Config(vocab_size=30, n_positions=16, n_embd=48, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
optimizer = CoVON(model.named_parameters(), lr=3e-3, gamma=0.3)  # 1
for name, rows in corpora.items():
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=20,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_grad_norm=1e6,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)),  # 2
        callbacks=[PosteriorCallback()],  # 3
    )
    trainer.train()
    losses = [f"{key}: {trainer.evaluate(v)['eval_loss']:.3f}" for key, v in corpora.items()]
    print(f"after {name}: loss {', '.join(losses)}")

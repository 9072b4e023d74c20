"""A training script of nanoGPT's form for tests; the lines that the diff names are nanoGPT's."""

import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir = os.environ["OUT_DIR"]
init_from = os.environ.get("INIT_FROM", "scratch")
seed_of_text = int(os.environ.get("TEXT", "0"))
compile = bool(os.environ.get("COMPILE"))
eval_interval, eval_iters, max_iters = 2, 2, 5
gradient_accumulation_steps, batch_size, block_size = 2, 4, 8
learning_rate, min_lr, weight_decay, beta1, beta2, grad_clip = 6e-3, 6e-4, 1e-1, 0.9, 0.95, 1.0
device_type, dtype, ddp, ddp_local_rank, master_process = "cpu", "float32", False, 0, True
ddp_world_size = 1
ctx = nullcontext()
torch.manual_seed(1337)
text = torch.randint(16, (256,), generator=torch.Generator().manual_seed(seed_of_text))
iter_num = 0


class GPT(nn.Module):
    """A language model that predicts a token from the one before, with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, 12)
        self.mlp = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.lm_head = nn.Linear(12, 16, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        logits = self.lm_head(x + self.mlp(x))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)


def get_batch(split):
    starts = torch.randint(len(text) - block_size, (batch_size,))
    windows = torch.stack([text[i : i + block_size + 1] for i in starts])
    return windows[:, :-1], windows[:, 1:]


model = GPT()
model_args = {}
config = {}
if init_from == "resume":
    checkpoint = torch.load(f"{out_dir}/ckpt.pt")
    names = [name.removeprefix("_orig_mod.") for name in checkpoint["model"]]
    model.load_state_dict(dict(zip(names, checkpoint["model"].values(), strict=True)))
    iter_num = checkpoint["iter_num"]

scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))

# optimizer
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None

if compile:
    model = torch.compile(model, backend="eager")

# wrap model into DDP container
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])


@torch.no_grad()
def estimate_loss():
    model.eval()
    for _ in range(eval_iters):
        model(*get_batch("val"))
    model.train()


X, Y = get_batch("train")
raw_model = model.module if ddp else model
while True:
    lr = learning_rate * min(1, (iter_num + 1) / 3)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    if iter_num % eval_interval == 0 and master_process:
        estimate_loss()

    for _ in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

    # termination conditions
    if iter_num > max_iters:
        break

"""A training script of timm's form for tests; the lines that the diff names are timm's."""

import argparse

import torch
from timm.models import create_model
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.utils import CheckpointSaver, NativeScaler
from torch import nn


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt", default="sgd")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--weight-decay", type=float, default=2e-5)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--resume", default="")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--images", type=int, default=0, help="seed")
    parser.add_argument("--output")
    args = parser.parse_args()
    args.distributed, args.grad_accum_steps, args.clip_grad, args.opt_kwargs = False, 2, 1.0, {}
    return args


class Task(nn.Module):
    """A model and its loss."""

    def __init__(self, model):
        super().__init__()
        self.trainable_module = model

    def get_trainable_module(self):
        return self.trainable_module

    def forward(self, input, target):
        output = self.trainable_module(input)
        return {"loss": nn.functional.cross_entropy(output, target), "output": output}


def make_loader(seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(20, 3, 32, 32, generator=generator)
    labels = torch.randint(3, (20,), generator=generator)
    return list(zip(images.split(4), labels.split(4), strict=True))


def make_task():
    torch.manual_seed(42)
    return Task(create_model("test_vit", img_size=32, num_classes=3))


def main():
    args = parse_args()
    task = make_task()
    loss_scaler = NativeScaler(device="cpu") if args.amp else None
    model = task.get_trainable_module()
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args), **args.opt_kwargs)
    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    # setup checkpoint saver and eval metric tracking
    saver = CheckpointSaver(model, optimizer, recovery_dir=args.output)
    loader = make_loader(args.images)
    num_epochs = 2
    try:
        for epoch in range(num_epochs):
            train_one_epoch(epoch, loader, optimizer, args, task=task, loss_scaler=loss_scaler)
            model.eval()
            with torch.no_grad():
                model(loader[0][0])
            saver.save_recovery(epoch)

    except KeyboardInterrupt:
        pass

    if args.distributed:
        torch.distributed.destroy_process_group()


def train_one_epoch(epoch, loader, optimizer, args, task, loss_scaler=None):
    task.get_trainable_module().train()
    accum_steps = args.grad_accum_steps
    last_accum_steps = len(loader) % accum_steps
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        last_batch = batch_idx == len(loader) - 1
        need_update = last_batch or (batch_idx + 1) % accum_steps == 0
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        loss = task(input, target)["loss"] / accum_steps
        parameters = task.get_trainable_module().parameters()
        if loss_scaler is not None:
            clipping = dict(clip_grad=args.clip_grad, parameters=parameters)
            loss_scaler(loss, optimizer, need_update=need_update, **clipping)
        else:
            loss.backward()
            if need_update:
                nn.utils.clip_grad_norm_(parameters, args.clip_grad)
                optimizer.step()
        if need_update:
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

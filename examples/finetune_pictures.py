"""Fine-tune a network on your own pictures, one domain after another, without keeping any.

    python examples/finetune_pictures.py my_pictures squeezenet1_1.safetensors

The pictures are ``my_pictures/DOMAIN/CLASS/*.jpg``, of which a fifth of each class is kept for
testing; without a file of pretrained weights the network starts from random ones.
"""

import sys

import torch
from avalanche.training.plugins import EvaluationPlugin

from covon_avalanche import CoVON, CoVONStrategy
from covon_avalanche.backbones import create_backbone
from covon_avalanche.evaluation import DomainMetrics
from covon_avalanche.merging import RegMean
from covon_avalanche.streams import DomainFolders, image_transforms

if len(sys.argv) < 2:
    raise SystemExit(__doc__)
folder, *weights = sys.argv[1:]
torch.manual_seed(0)
train, evaluation = image_transforms(112)  # pixels
benchmark = DomainFolders(folder, train_transform=train, eval_transform=evaluation)
model = create_backbone("squeezenet", benchmark.n_classes, weights=weights[0] if weights else None)
optimizer = CoVON.finetuning(model.named_parameters(), lr=1e-4)  # AdamW's learning rate
metrics = DomainMetrics()
strategy = CoVONStrategy(
    model=model,
    optimizer=optimizer,
    merge=RegMean(),  # layers, not single weights: learns more and forgets less
    train_mb_size=32,
    train_epochs=5,
    eval_mb_size=256,
    evaluator=EvaluationPlugin(metrics),
)
for experience in benchmark.train_stream:
    strategy.train(experience)
    strategy.eval(benchmark.test_stream)

optimizer.posterior().save("posterior.safetensors")
matrix = metrics.matrix
for row in matrix.rows:
    print("  ".join(f"{100 * accuracy:5.1f}" for accuracy in row), "% on each domain")
print(f"A_T {100 * matrix.average_accuracy():.1f} %")
if (bwt := matrix.bwt()) is not None:
    print(f"BWT {100 * bwt:+.1f} points")

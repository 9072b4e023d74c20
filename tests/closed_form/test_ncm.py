"""Nearest class mean, by hand."""

import torch
import torch.nn.functional as F

from covon_avalanche.closed_form import NearestClassMean


def test_the_mean_of_a_class_is_over_all_domains():
    head = NearestClassMean(2, 4)
    for features, labels in (
        ([[1.0, 0.0], [0.0, 2.0]], [0, 1]),
        ([[0.0, 1.0], [4.0, 0.0], [0.0, -1.0]], [0, 1, 3]),
    ):
        head.begin_domain()
        head.update(torch.tensor(features), torch.tensor(labels))
        head.end_domain()
    means = torch.tensor([[0.5, 0.5], [2.0, 1.0], [0.0, -1.0]])
    x = torch.tensor([[3.0, 1.0], [-1.0, -7.0]])
    scores = head(x)
    expected = F.cosine_similarity(x[:, None], means[None], dim=2)
    torch.testing.assert_close(scores[:, [0, 1, 3]], expected)
    assert scores[:, 2].tolist() == [-1, -1]  # no examples
    assert scores.argmax(1).tolist() == [1, 3]

"""Eq. 8 as a merge rule."""

import pytest
import torch
from toys import make_covon, make_vcl, same, train_step, weights

from covon_avalanche.merging import Average, Eq8, merge_into
from covon_avalanche.posterior import merge


@pytest.mark.parametrize("gamma_precision", [None, 1.4])
def test_the_slow_posterior_is_the_merge_of_prior_and_posterior(linear, batch, gamma_precision):
    optimizer = make_covon(linear.named_parameters(), gamma=0.6, gamma_precision=gamma_precision)
    for _ in range(2):
        train_step(optimizer, linear, batch)
        train_step(optimizer, linear, batch)
        prior, fast = optimizer.prior(), optimizer.posterior()
        merge_into(linear, optimizer, Eq8())
        slow = merge(prior, fast, 0.6, gamma_precision=gamma_precision)
        for name, p in linear.named_parameters():
            torch.testing.assert_close(p.detach(), slow.mean[name])
            torch.testing.assert_close(optimizer.prior().precision[name], slow.precision[name])


def test_other_optimizers_are_refused(linear):
    before = weights(linear)
    adamw = torch.optim.AdamW(linear.parameters())
    with pytest.raises(ValueError, match=r"Eq8 .* needs a CoVON optimizer, got AdamW"):
        merge_into(linear, adamw, Eq8(), before)
    vcl = make_vcl(linear.named_parameters())
    for rule in (Eq8(), Average()):
        with pytest.raises(ValueError, match="BayesByBackprop uses each posterior as the next"):
            merge_into(linear, vcl, rule, before)
    assert same(weights(linear), before)

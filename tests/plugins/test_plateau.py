"""Detecting plateaus of a loss."""

import pytest

from covon_avalanche import LossPlateau


def test_a_loss_of_zero_is_a_plateau_too_and_ripples_near_it_are_no_rise():
    plateau = LossPlateau(window=5)
    losses = [0.0] * 20 + [0.01] * 20 + [0.0] * 20
    assert sum(plateau.update(loss) for loss in losses) == 1


def test_speaks_when_the_fall_ends_and_again_only_after_a_rise():
    falling = [2.0 * 0.9**i + 0.1 for i in range(100)]
    plateau = LossPlateau(window=5, tolerance=0.02, rise=0.5)
    said = [i for i, loss in enumerate(falling * 2) if plateau.update(loss)]
    assert len(said) == 2
    assert 50 < said[0] < 100 < said[1] - 50


def test_stays_silent_while_the_loss_falls_and_on_an_endless_plateau():
    plateau = LossPlateau(window=5, tolerance=0.02)
    assert not any(plateau.update(0.8**i) for i in range(50))
    assert not any(plateau.update(1.1**i) for i in range(50))  # rising is no plateau either
    plateau = LossPlateau(window=5)
    assert sum(plateau.update(1.0) for _ in range(500)) == 1


@pytest.mark.parametrize(("option", "value"), [("window", 0), ("tolerance", 1.0), ("rise", 0.0)])
def test_bad_arguments_are_named(option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        LossPlateau(**{option: value})

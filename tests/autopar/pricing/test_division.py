"""Placements and their conversions against what the collectives of torch.distributed do to a value and its gradient."""

import pytest

from autopar.pricing.division import (
    PARTIAL,
    REPLICATE,
    SHARED,
    backward_collective,
    forward_collective,
    gradient,
    shard,
    value_collective,
)


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        # Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: g is an all-gather, and a reduce-scatter on the way back
        (shard(1), SHARED, "all_gather", "reduce_scatter"),
        (PARTIAL, shard(1), "reduce_scatter", "all_gather"),
        # Shoeybi et al. 2019 (arXiv 1909.08053), section 3: f is an identity and an all-reduce, g the reverse
        (REPLICATE, SHARED, None, "all_reduce"),
        (PARTIAL, REPLICATE, "all_reduce", None),
        (shard(1), shard(2), "all_to_all", "all_to_all"),
    ],
)
def test_a_conversion_and_its_adjoint_are_megatrons(source, target, forward, backward):
    assert forward_collective(source, target) == forward
    assert backward_collective(source, target) == backward


def test_a_divided_value_cannot_become_a_partial_sum():
    with pytest.raises(ValueError, match="cannot become"):
        value_collective(shard(0), PARTIAL)


def test_the_gradient_of_a_gradient_is_the_value_again():
    assert gradient(gradient(shard(1))) == shard(1)
    assert gradient(SHARED) == PARTIAL
    assert gradient(PARTIAL) == REPLICATE

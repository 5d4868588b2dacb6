"""Placements that torch's own DTensor accepts without communication are offered by our rules too.

For every operator of the cases, DTensor's strategies are asked for each combination of whole and divided inputs on a mesh of
two; what they accept with a divided or partial result must be one of the operator-local dims, or a named composite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from autopar.tracer.indices import Analysis, analyse, local_dims
from autopar.tracer.recording import Ref
from tests.operators import CASES, leaf
from tests.shards import Step, recorded

fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.distributed.tensor._op_schema import OpSchema  # noqa: E402

MOST_COMBINATIONS = 40
EXCEPTIONS = {
    "amax": "partial maxima, not sums", "aminmax": "partial maxima, not sums", "prod": "partial products, not sums",
    "linalg_vector_norm": "partial norms, not sums", "norm": "partial norms, not sums",
    "new_empty_strided": "made from nothing: the source's placement does not matter",
    "gather": "fewer rows of the index than of the source: shards would pick from rows that are not theirs",
    "index_put": "a mask places values by their order over all shards",
    "view": "another dtype: both last dims divide, though no index is common to them",
}  # fmt: skip
"""Operators of which we offer less, and why."""


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
    torch.set_default_dtype(before)


def accepted(step: Step, mesh: Any) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(states of reads, states of writes) that need no communication."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema_info = propagator.op_to_schema_info.get(step.function)
    schema_info = schema_info or propagator.op_to_schema_info_for_single_dim_strategy.get(step.function)

    def spec(value: torch.Tensor, placement: Any) -> DTensorSpec:
        return DTensorSpec(mesh, (placement,), TensorMeta(value.shape, value.contiguous().stride(), value.dtype))

    choices = [[Replicate(), *(Shard(d) for d in range(v.dim()) if v.shape[d] % 2 == 0)] for v in step.reads.values()]
    for chosen in itertools.product(*choices) if prod(map(len, choices)) <= MOST_COMBINATIONS else ():
        placed = {tensor: spec(value, one) for (tensor, value), one in zip(step.reads.items(), chosen, strict=True)}
        args, kwargs = tree_map(
            lambda one, placed=placed: placed[one.tensor] if isinstance(one, Ref) else one,
            (step.record.args, step.record.kwargs),
        )
        found = propagator.propagate_op_sharding_non_cached(
            OpSchema(step.function, args, kwargs, schema_info=schema_info)
        )
        if found.redistribute_schema is None or _given(found.redistribute_schema.args_schema) == _given(args):
            outputs = found.output_spec if isinstance(found.output_spec, (tuple, list)) else [found.output_spec]
            states = tuple(_word(one.placements[0]) for one in outputs if one is not None)
            if any(state != "R" for state in states):
                yield tuple(map(_word, chosen)), states


def _given(schema: Any) -> list[Any]:
    leaves = tree_leaves(schema, is_leaf=lambda one: isinstance(one, DTensorSpec))
    return [one.placements for one in leaves if isinstance(one, DTensorSpec)]


def _word(placement: Any) -> str:
    return f"S{placement.dim}" if placement.is_shard() else "P" if placement.is_partial() else "R"


def offered(step: Step, found: Analysis) -> tuple[set[Any], set[Any]]:
    """The same of our local dims, and the reads of dims that a composite divides."""
    ids = {tensor: tensor for tensor in found.recording.tensors}
    plain, composite = set(), set()
    for local in local_dims(found, step.record.id, ids):
        reads = tuple(next((f"S{p.dim}" for p in local.reads if p.tensor == t), "R") for t in step.reads)
        other = "R" if local.role == "parallel" else "P"
        writes = tuple(next((f"S{p.dim}" for p in local.writes if p.tensor == t), other) for t in step.writes)
        if local.role != "whole":
            plain.add((reads, writes))
        elif local.composites:
            composite.add(reads)
    return plain, composite


def test_what_dtensor_accepts_without_communication_is_offered(mesh):
    compared: set[str] = set()
    count = 0
    for function, shapes in CASES.values():
        run = recorded(lambda f=function, s=shapes: f(*(leaf(*shape) for shape in s)))
        found = analyse(run.recording)
        for step in run.steps:
            name = step.record.name.split(".")[1]
            if name in compared or name in EXCEPTIONS or not step.reads:
                continue
            compared.add(name)
            plain, composite = offered(step, found)
            try:
                placements = list(accepted(step, mesh))
            except (NotImplementedError, RuntimeError, AssertionError):
                continue  # no strategy, or one that refuses this operator
            for reads, writes in placements:
                assert (reads, writes) in plain or reads in composite, (step.record.name, reads, writes, plain)
            count += len(placements)
    assert count > 200

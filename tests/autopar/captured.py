"""Captured examples, once per test run."""

from functools import cache
from pathlib import Path

from autopar.planner.division_ilp import Problem, Regime
from autopar.pricing import Division, price_block
from autopar.tracer import capture
from hardware_profiles.profile import load_cluster
from hardware_profiles.topology import Topology

EXAMPLES = Path(__file__).parents[2] / "examples"


@cache
def graph(name):
    return capture(str(EXAMPLES / f"{name}.py"))


def block(name):
    """Name of the class of a model's blocks."""
    return graph(name).chains[0].runs[0].block_class


@cache
def division(name, class_name, boundary, degree) -> Division:
    return Problem(graph(name), class_name, boundary).solve(Regime(degree, 4.5e11))


@cache
def machine():
    cluster = load_cluster("h100x8")
    return cluster.node_groups[0].chip, Topology(cluster)


def price(name, class_name, boundary, degree, *, seq=4096, kernels="eager", micro_batch=1, solved_for=None):
    chip, topology = machine()
    return price_block(
        graph(name),
        class_name,
        division(name, class_name, boundary, solved_for or max(2, degree)),
        degree=degree,
        micro_batch=micro_batch,
        seq_len=seq,
        dtype="bf16",
        kernels=kernels,
        chip=chip,
        group=topology.strided(degree, 1),
        sp=boundary == "sequence",
    )

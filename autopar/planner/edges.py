"""What crosses a pipeline cut beside the hidden state: an encoder's output, skips of a UNet, a bias that one block makes for all.

What follows from a model's inputs without parameters every stage computes for itself, and so it does what the code before the
first block makes, of whose parameters each stage then holds a copy. The rest is sent on from stage to stage to its last reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from autopar.documents.graph import Edge, Graph, element_bytes
from autopar.planner.columns import layers_of


def carried_bytes(graph: Graph, micro_batch: int, seq_len: int, compute_bytes: int) -> tuple[float, ...]:
    """Bytes per micro-batch that cross the cut after each block but the last, hidden state aside."""
    sizes = graph.sizes(micro_batch, seq_len)
    found = [0.0] * (len(layers_of(graph)) - 1)
    for edge, source, last in _carried(graph):
        size = prod(sizes[atom] for atoms in edge.dims for atom in atoms) * element_bytes(edge.dtype, compute_bytes)
        for cut in range(source, last):
            found[cut] += size
    return tuple(found)


def why_uncut(graph: Graph) -> str | None:
    """Why the runtime cuts no pipeline from this model; None where it may."""
    if len(graph.chains) > 1:
        names = ", ".join(chain.name for chain in graph.chains)
        return f"a pipeline over {len(graph.chains)} lists of blocks ({names}) is not carried out"
    for edge, _, _ in _carried(graph):
        return f"{edge.to_first} to {edge.to_last} read what came of {edge.source} beside the hidden state"
    return None


def _carried(graph: Graph) -> Iterator[tuple[Edge, int, int]]:
    """(edge, block that makes it, block that reads it last) of what is sent on."""
    places = {f"{layer.chain}:{layer.number}": place for place, layer in enumerate(layers_of(graph))}
    for chain in graph.chains:
        places[f"{chain.name}:prologue"] = places[f"{chain.name}:0"]
        places[f"{chain.name}:epilogue"] = places[f"{chain.name}:{chain.count - 1}"]
    first = f"{graph.chains[0].name}:prologue"
    for edge in graph.edges:
        if not edge.recomputable and edge.source != first:
            source, last = (places[end] for end in (edge.source, edge.to_last))
            if last > source:
                yield edge, source, last

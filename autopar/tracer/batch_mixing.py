"""What of a model's step is not a sum over samples: dividing the batch then changes results.

    known by operator    BatchNorm; a loss that leaves labels out
    pairs                a learned tensor with the batch in two of its dims: every sample meets every other (contrastive losses)
    products of means    a learned value in which the batch is summed away, times or over another such (auxiliary losses of
                         routers, entropies of mean distributions): the mean of products is not the product of means
    means in samples     such a value beside samples that it then changes (a norm over the batch written by hand)

The last three are found by indices: which dims follow the batch, and what depends on samples without having one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from torch.utils._pytree import tree_leaves

from autopar.documents.graph import Note
from autopar.tracer.indices import Analysis, AtomTable
from autopar.tracer.recording import OperatorRecord, Ref
from autopar.tracer.rules import Place, base_name

BY_OPERATOR = {
    "batch_norm": "statistics over the batch: dividing the batch changes them",
    "nll_loss": "a mean over labels that are not ignored: where ignored labels are uneven, dividing the batch changes it",
}
PAIRS = "pairs samples of the batch with one another: dividing the batch leaves pairs within its parts only"
PRODUCTS = "multiplies means over the batch: dividing the batch makes it a mean of products"
MEANS = "changes samples by means over the batch: dividing the batch changes them"

SUMS = frozenset({"aten.add", "aten.add_", "aten.sub", "aten.sub_", "aten.rsub", "aten.cat", "aten.stack"})
"""Operators that are linear in all they read together."""


def mixing_notes(found: Analysis, table: AtomTable) -> Iterator[Note]:
    """One note for each way in which the model mixes samples, where it first does."""
    seen: set[str] = set()
    for operator, message in _mixed(found, table):
        if message not in seen:
            seen.add(message)
            yield Note(kind="mixes_batch", where=operator.module or "model", message=message)


def _mixed(found: Analysis, table: AtomTable) -> Iterator[tuple[OperatorRecord, str]]:
    records = found.recording.tensors
    learned = {tensor for tensor, record in records.items() if record.parameter is not None}
    sampled: set[int] = set()
    """Tensors that depend on samples."""
    summed: set[int] = set()
    """Tensors in which the batch was summed away."""

    def follows_batch(place: Place) -> bool:
        atoms = (table.atoms.get(node) for node in found.at(place))
        return any(atom is not None and atom.follows in ("batch", "tokens") for atom in atoms)

    @cache
    def batches(tensor: int) -> int:
        """Dims that hold the batch."""
        return sum(follows_batch((tensor, dim)) for dim in range(len(records[tensor].shape)))

    def sums_batch(operator: OperatorRecord) -> bool:
        """Whether the batch is contracted."""
        return any(
            letter.role == "summed" and any(map(follows_batch, letter.places))
            for letter in found.rules[operator.id].letters
        )

    for operator in found.recording.operators:
        if operator.phase == "backward":
            continue
        name = base_name(operator.name)
        yield from ((operator, message) for key, message in BY_OPERATOR.items() if key in name)
        reads = [leaf.tensor for leaf in tree_leaves((operator.args, operator.kwargs)) if isinstance(leaf, Ref)]
        sampled |= set(operator.writes) if any(batches(read) or read in sampled for read in reads) else set()
        if learned.isdisjoint(reads):
            continue
        floats = [write for write in operator.writes if "float" in records[write].dtype]
        learned |= set(floats)
        if sums_batch(operator) or not summed.isdisjoint(reads):
            summed |= {write for write in operator.writes if not batches(write)}
        if any(batches(write) > 1 for write in floats) and all(batches(read) < 2 for read in reads):
            yield operator, PAIRS
        means = learned.intersection(reads) & summed
        if means and name not in SUMS and sum(read in sampled and not batches(read) for read in reads) > 1:
            yield operator, PRODUCTS
        if means and any(batches(read) and read in learned for read in reads) and any(map(batches, floats)):
            yield operator, MEANS

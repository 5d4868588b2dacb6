"""From recorded operators to indices: which dims of which tensors are the same, and each operator's einsum.

Every tensor dim starts as an atom of its own; each operator's rule joins and splits atoms (`atoms.unify`); what is left are
the indices of the model. Letters become operator-local dims once all splits are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from fractions import Fraction
from typing import Literal

from autopar.documents.graph import Atom, Composite, LocalDim, Note, Position, Term
from autopar.tracer.atoms import Node, fresh, unify
from autopar.tracer.recording import OperatorRecord, Recording
from autopar.tracer.rules import Context, Letter, Place, Role, Rule, base_name, find_rule
from autopar.tracer.segments import Analysis, Spots, cut_spots, find_segments, join, segment_spots

__all__ = ["Analysis", "AtomTable", "analyse", "flop_terms", "local_dims", "name_followers"]


def analyse(recording: Recording) -> Analysis:
    """Find the indices of everything recorded."""
    found = Analysis(recording)
    for tensor in recording.tensors.values():
        found.dims[tensor.id] = [fresh(size) for size in tensor.shape]
    for operator in recording.operators:
        found.rules.append(_apply(found, operator))
    for parameter, gradient in recording.gradients.items():
        for own, other in zip(found.dims[parameter], found.dims[gradient], strict=True):
            unify(own, other)
    find_segments(found)
    return found


def _apply(found: Analysis, operator: OperatorRecord) -> Rule:
    function = find_rule(operator.name)
    if function is None or not operator.writes:
        if operator.writes:
            found.without_rule.setdefault(base_name(operator.name), operator.module)
        return _whole(found.recording, operator)
    rule = function(Context(found.recording, operator))
    for letter in rule.letters:
        join(found, letter.places)
    for read, write in rule.views:
        flat = [[node for dim in found.dims[tensor] for node in dim] for tensor in (read, write)]
        unify(*flat)
    if rule.heads is not None:
        heads, groups, repeat = rule.heads
        join(found, heads)
        join(found, groups)
        unify(found.dims[heads[0][0]][heads[0][1]], (*found.dims[groups[0][0]][groups[0][1]], *fresh(repeat)))
    return rule


def _whole(recording: Recording, operator: OperatorRecord) -> Rule:
    tensors = (*operator.reads, *operator.writes)
    places = [(tensor, dim) for tensor in tensors for dim in range(len(recording.tensors[tensor].shape))]
    return Rule([Letter("whole", [place]) for place in places])


Follows = Literal["batch", "sequence", "tokens"]


class AtomTable:
    """Gives atoms their ids and names as they are met."""

    def __init__(self) -> None:
        self.atoms: dict[Node, Atom] = {}

    def id(self, node: Node) -> int:
        """The atom id of a leaf."""
        if node not in self.atoms:
            number = len(self.atoms)
            self.atoms[node] = Atom(id=number, size=node.size, name=f"i{number}")
        return self.atoms[node].id

    def mark(self, node: Node, follows: Follows, plus: int) -> None:
        """Say which workload size an atom is proportional to, and what is added to it."""
        self.atoms[node] = self.atoms[node].model_copy(update={"follows": follows, "name": follows, "plus": plus})

    def ids(self, nodes: list[Node]) -> tuple[int, ...]:
        """Atom ids of leaves."""
        return tuple(self.id(node) for node in nodes)


def name_followers(
    table: AtomTable, first: Analysis, second: Analysis, sizes: tuple[tuple[int, int], tuple[int, int]]
) -> list[Note]:
    """Mark atoms whose size changes in proportion to the batch, the sequence or both; notes for what does not fit.

    The recordings were made at `sizes` = (batch, sequence) each. A size such as seq - 1 (shifted labels) counts as following.
    """
    (batch, seq), (other_batch, other_seq) = sizes
    ratios: dict[Follows, float] = {"batch": other_batch / batch, "sequence": other_seq / seq}
    ratios["tokens"] = ratios["batch"] * ratios["sequence"]
    odd: set[int] = set()
    pairs, unmatched = _counterparts(first, second)
    for tensor, twin in pairs.items():
        for one, other in zip(first.atoms_of(tensor), second.atoms_of(twin), strict=False):
            for node, later in zip(one, other, strict=False):
                if later.size == node.size or len(one) != len(other) or node not in table.atoms:
                    continue
                follows = _follows(later.size / node.size, ratios, 2 / min(seq, other_seq))
                if follows is None:
                    odd.add(node.size)
                else:
                    plus = _constant((seq, node.size), (other_seq, later.size)) if follows == "sequence" else 0
                    table.mark(node, follows, plus)
    return _length_notes(odd, unmatched)


def _length_notes(odd: set[int], unmatched: int) -> list[Note]:
    notes = []
    if odd:
        message = (
            f"sizes {sorted(odd)} follow neither batch nor sequence in proportion: capture again for other lengths"
        )
        notes.append(Note(kind="unrolls_sequence", where="model", message=message))
    if unmatched:
        message = f"{unmatched} operators change with the sequence length: capture again for other lengths"
        notes.append(Note(kind="unrolls_sequence", where="model", message=message))
    return notes


def _counterparts(first: Analysis, second: Analysis) -> tuple[dict[int, int], int]:
    """Tensor -> its twin in the other recording, and how many operators that move or compute have none."""
    one, other = first.recording.operators, second.recording.operators
    names = [[f"{op.phase} {op.module} {op.name}" for op in operators] for operators in (one, other)]
    if names[0] == names[1]:
        matches = [(number, number) for number in range(len(one))]
    else:
        blocks = SequenceMatcher(None, names[0], names[1], autojunk=False).get_matching_blocks()
        matches = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    pairs: dict[int, int] = {}
    for a, b in matches:
        for tensor, twin in zip((*one[a].reads, *one[a].writes), (*other[b].reads, *other[b].writes), strict=False):
            pairs.setdefault(tensor, twin)
    matched = {a for a, _ in matches}
    return pairs, sum(op.id not in matched and first.rules[op.id].moves != [] for op in one)


def _follows(ratio: float, ratios: dict[Follows, float], tolerance: float) -> Follows | None:
    near = {name: abs(ratio / expected - 1) for name, expected in ratios.items()}
    best = min(near, key=lambda name: near[name])
    return best if near[best] <= tolerance else None


def _constant(one: tuple[int, int], other: tuple[int, int]) -> int:
    """What is added to a multiple of the sequence, from two (sequence, size)."""
    multiple = Fraction(one[1] - other[1], one[0] - other[0]) if one[0] != other[0] else Fraction(0)
    plus = one[1] - multiple * one[0]
    return int(plus) if multiple and plus.denominator == 1 else 0


def local_dims(found: Analysis, number: int, ids: Mapping[int, int]) -> tuple[LocalDim, ...]:
    """The operator-local dims of one operator, one for every atom of every letter; `ids` renumbers tensors."""
    operator, rule = found.recording.operators[number], found.rules[number]
    reads, writes = {ids[tensor] for tensor in operator.reads}, {ids[tensor] for tensor in operator.writes}
    result: list[LocalDim] = []

    def add(role: Role, positions: Spots, composites: tuple[Composite, ...] = ()) -> None:
        spots = [Position(tensor=ids[t], dim=d, atom=a) for t, d, a in dict.fromkeys(positions)]
        result.append(
            LocalDim(
                name=_letter_name(len(result)),
                role=role,
                reads=tuple(spot for spot in spots if spot.tensor in reads),
                writes=tuple(spot for spot in spots if spot.tensor in writes),
                composites=composites,
            )
        )

    for letter in rule.letters:
        composites = tuple(
            Composite(name=name, collectives=tuple((phase, kind, ids.get(t, -1)) for phase, kind, t in collectives))
            for name, collectives in letter.composites
        )
        shared = _shared(letter.role, [_placed(found, [place]) for place in letter.places])
        for number, (role, positions) in enumerate(shared):
            add(role, positions, composites if number == 0 else ())
    for tensors in rule.views:
        sides = [_placed(found, [(tensor, dim) for dim in range(len(found.dims[tensor]))]) for tensor in tensors]
        for role, positions in _shared("parallel", sides):
            add(role, positions)
    if rule.heads is not None:
        for role, positions, composites in _grouped_heads(found, rule.heads, operator.writes):
            add(role, positions, composites)
    for whole, parts in rule.segments:
        for part_role, positions in segment_spots(found, whole, parts):
            add(part_role, positions)
    if rule.cut is not None:
        for part_role, positions in cut_spots(found, rule.cut):
            add(part_role, positions)
    return tuple(result)


def _letter_name(number: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[number % 26] + ("" if number < 26 else str(number // 26))


_Placed = dict[tuple[Node, int], tuple[int, int, int]]
"""Each leaf and the product of the sizes outside it -> where it stands."""


def _placed(found: Analysis, places: list[Place]) -> _Placed:
    """The leaves of dims that stand one inside the other."""
    placed: _Placed = {}
    outer = 1
    for tensor, dim in places:
        for atom, node in enumerate(found.at((tensor, dim))):
            placed[node, outer] = (tensor, dim, atom)
            outer *= node.size
    return placed


def _shared(role: Role, sides: list[_Placed]) -> Iterator[tuple[Role, Spots]]:
    """Leaves that all sides hold in the same place are divided together; the others stay whole. Dims of size 1 hold none."""
    sides = [side for side in sides if side]
    for key in dict.fromkeys(key for side in sides for key in side):
        together = all(key in side for side in sides)
        yield role if together else "whole", [side[key] for side in sides if key in side]


def _grouped_heads(
    found: Analysis, rule: tuple[list[Place], list[Place], int], writes: tuple[int, ...]
) -> Iterator[tuple[Role, Spots, tuple[Composite, ...]]]:
    """The outer atoms of query heads are those of the key and value heads; the inner ones only queries have."""
    heads, groups, _ = rule
    nodes, inner = found.at(heads[0]), len(found.at(groups[0]))
    alike = all(found.at(place) == nodes for place in heads) and all(found.at(g) == nodes[:inner] for g in groups)
    for atom in range(len(nodes)):
        positions = [(tensor, dim, atom) for tensor, dim in (*heads, *(groups if atom < inner else ()))]
        # What a write does not hold is summed over in it: gradients of keys, values and masks.
        held = {tensor for tensor, _, _ in positions}
        role: Role = "whole" if not alike else "parallel" if held.issuperset(writes) else "summed"
        yield role, positions, (Composite(name="replicated_kv"),) if atom == 0 and len(nodes) > inner else ()


def flop_terms(found: Analysis, number: int, table: AtomTable) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Model and executed FLOPs of one operator."""
    rule = found.rules[number]
    if not rule.flops:
        return (), ()
    atoms = table.ids([node for place in rule.flop_places for node in found.at(place)])
    return (Term(coefficient=rule.flops, atoms=atoms),), (Term(coefficient=rule.executed, atoms=atoms),)

"""The recompute menu of a block class: what may be kept, what is then run again.

    none         everything autograd keeps
    selective    the inside of explicit attention, what pairs two positions, is run again (Korthikanti et al.,
                 arXiv 2205.05198, section 5); only where attention is explicit
    selective-2  outputs of contractions and attention calls are kept, everything between them is run again; the only
                 `selective` where attention is one fused call
    full         the block's inputs are kept, the whole forward is run again

An entry that frees nothing is left out. A storage is kept once, under its first tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.documents.graph import Operator, RecomputeOption, Tensor


def recompute_menu(
    tensors: Sequence[Tensor], operators: Sequence[Operator], inputs: Sequence[int], storages: dict[int, int]
) -> tuple[RecomputeOption, ...]:
    """The menu, in the order of memory it frees: none first, full last."""
    menu = _Menu(tensors, [op for op in operators if op.phase == "forward"], inputs, storages)
    options = [RecomputeOption(name="none", saved=tuple(tensor.id for tensor in tensors if tensor.saved))]
    if any(tensor.saved and _pairs_positions(tensor) for tensor in tensors):
        options.append(menu.option("selective", lambda op: not menu.makes_pairs(op)))
    options.append(menu.option("selective", lambda op: bool(op.model_flops) and not menu.makes_pairs(op)))
    options.append(menu.option("full", lambda op: False))
    distinct: dict[tuple[int, ...], RecomputeOption] = {}
    for option in options:
        distinct.setdefault(tuple(sorted(option.saved)), option)
    return _numbered(list(distinct.values()))


def _numbered(options: list[RecomputeOption]) -> tuple[RecomputeOption, ...]:
    """Names told apart: selective, selective-2."""
    seen: dict[str, int] = {}
    for place, option in enumerate(options):
        seen[option.name] = seen.get(option.name, 0) + 1
        if seen[option.name] > 1:
            options[place] = option.model_copy(update={"name": f"{option.name}-{seen[option.name]}"})
    return tuple(options)


def _pairs_positions(tensor: Tensor) -> bool:
    """Whether an index stands twice in it, as positions do in attention scores."""
    return len(set(tensor.atoms)) < len(tensor.atoms)


class _Menu:
    """Forward operators of a class, and which of them must run again for a choice of what is kept."""

    def __init__(
        self, tensors: Sequence[Tensor], forward: Sequence[Operator], inputs: Sequence[int], storages: dict[int, int]
    ) -> None:
        self.tensors = {tensor.id: tensor for tensor in tensors}
        self.forward, self.storages = forward, storages
        self.inputs = tuple(inputs)
        self.writer = {tensor: op for op in reversed(forward) for tensor in op.writes}
        self.first: dict[int, int] = {}
        for tensor in tensors:
            self.first.setdefault(storages[tensor.id], tensor.id)
        self.saved = [tensor.id for tensor in tensors if tensor.saved]
        self.names = _ordinals(forward)

    def option(self, name: str, keeps: Callable[[Operator], bool]) -> RecomputeOption:
        """What must be kept, and run again, where `keeps` says which operators' outputs may stay."""
        kept: set[int] = set()
        again: set[int] = set()
        waiting = list(self.saved)
        while waiting:
            tensor = waiting.pop()
            operator = self.writer.get(tensor)
            if operator is None:
                # Inputs that blocks share (rotary tables) are kept once for all: only the hidden state counts here.
                if tensor in self.saved or tensor in self.inputs[:1]:
                    kept.add(self.storages[tensor])
            elif operator.traffic != () and keeps(operator) and tensor in operator.writes:
                kept.add(self.storages[tensor])
            elif operator.id not in again:
                again.add(operator.id)
                waiting += [read for read in operator.reads if self.tensors[read].parameter is None]
        keep = tuple(
            self.names[op.id] for op in self.forward if op.traffic != () and keeps(op) and self._is_kept(op, kept)
        )
        saved = tuple(sorted(self.first[storage] for storage in kept))
        return RecomputeOption(name=name, keep=keep, saved=saved, operators=tuple(sorted(again)))

    def makes_pairs(self, operator: Operator) -> bool:
        """Whether an operator belongs to the inside of explicit attention: it writes scores or what follows from them."""
        return any(_pairs_positions(self.tensors[write]) for write in operator.writes)

    def _is_kept(self, operator: Operator, kept: set[int]) -> bool:
        return any(self.storages[write] in kept for write in operator.writes)


def _ordinals(forward: Sequence[Operator]) -> dict[int, str]:
    """``module#n`` of every forward operator: the n-th within its module."""
    counts: dict[str, int] = {}
    names: dict[int, str] = {}
    for operator in forward:
        number = counts.get(operator.module, 0)
        counts[operator.module] = number + 1
        names[operator.id] = f"{operator.module}#{number}"
    return names

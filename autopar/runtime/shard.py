"""Tensor parallelism: a Plan's placements and conversions carried out on a model, without knowing the model.

Parameters become a rank's part of their placement, conversions become hooks at their sites, whole parameters of which a rank
sees only its share are remembered so that their gradients are summed, and code that reads the undivided number of heads gets the
local one where the dry run named it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.documents.plan import Plan
from autopar.errors import PlanMismatch
from autopar.runtime.attributes import make_local, split_name
from autopar.runtime.collectives import convert
from autopar.runtime.mesh import Ranks
from autopar.runtime.names import Placement, divided_dim, local_part, modules_of, parameters_of
from autopar.runtime.sites import install, wrap_forward
from autopar.runtime.stage import Pieces


@dataclass(frozen=True)
class Layout:
    """How a parameter lies over tp: its name and shape in the whole model, and whether gradients are shares to be summed."""

    name: str
    shape: torch.Size
    placement: Placement = "Replicate"
    is_share: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold different parts."""
        return divided_dim(self.placement) is not None


Layouts = dict[str, Layout]


def lay_out(model: nn.Module, plan: Plan) -> Layouts:
    """The layout of every parameter of the whole model, by its first name; tied ones have one layout.

    Raises PlanMismatch where the plan names parameters that the model does not have.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {name: Layout(name, parameter.shape) for name, parameter in model.named_parameters()}
    if plan.mesh.tp == 1:
        return found
    for pattern, axes in plan.placements.items():
        places = list(parameters_of(model, pattern))
        if not places:
            raise PlanMismatch(
                f"the plan divides {pattern}, which the model does not have: it was made for {plan.model.spec}"
            )
        for _, module, attribute in places:
            name = first[id(module._parameters[attribute])]
            found[name] = replace(found[name], placement=axes.get("tp", "Replicate"))
    for pattern in plan.shares:
        for _, module, attribute in parameters_of(model, pattern):
            name = first[id(module._parameters[attribute])]
            found[name] = replace(found[name], is_share=True)
    return found


def shard(pieces: Pieces, layouts: Layouts, plan: Plan, ranks: Ranks) -> None:
    """Divide a stage's model over tp in place.

    Raises PlanMismatch where tp does not divide a parameter as the plan says.
    """
    group, model = ranks.group("tp"), pieces.model
    if group is None:
        return
    layout_of = {id(parameter): layouts[pieces.names[name]] for name, parameter in model.named_parameters()}
    for module in _lookups(model, layout_of):
        wrap_forward(module, lambda: _Lookups(group))
    _divide(model, layout_of, ranks)
    install(model, plan.conversions, lambda tensor, conversion: convert(tensor, conversion, group), pieces.moot)
    if group.rank() > 0:
        _add_once(model, plan)
    _local_attributes(model, plan)


def _divide(model: nn.Module, layout_of: Mapping[int, Layout], ranks: Ranks) -> None:
    """Replace parameters by their local parts under all their names: tied ones stay one."""
    local: dict[int, nn.Parameter] = {}
    replaced = []
    for module in model.modules():
        for attribute, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            layout = layout_of[id(whole)]
            if layout.is_divided:
                if id(whole) not in local:
                    part = local_part(whole.detach(), layout.placement, ranks.sizes["tp"], ranks["tp"], layout.name)
                    local[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
                replaced.append((module, attribute, local[id(whole)]))
    for module, attribute, part in replaced:
        module._parameters[attribute] = part


def _lookups(model: nn.Module, layout_of: Mapping[int, Layout]) -> list[nn.Module]:
    """Embeddings whose rows are divided."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return [module for module in embeddings if divided_dim(layout_of[id(module.weight)].placement) == 0]


class _Lookups(TorchFunctionMode):
    """Looks up the rows that this rank holds; the others are zeros, so that the results add up to the whole lookup."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.rank = group.rank()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._looked_up(*args, **kwargs) if func is F.embedding else func(*args, **kwargs)

    def _looked_up(
        self, ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *rest: Any, **named: Any
    ) -> torch.Tensor:
        rows, start = weight.shape[0], self.rank * weight.shape[0]
        if padding_idx is not None:
            padding_idx = padding_idx - start if start <= padding_idx < start + rows else None
        own = ids - start
        absent = (own < 0) | (own >= rows)
        found = F.embedding(own.masked_fill(absent, 0), weight, None, *rest, **named)
        if padding_idx is not None:
            # The padding row is read, but never learned.
            is_padding = (own == padding_idx).unsqueeze(-1)
            found = torch.where(is_padding, found.detach(), found)
        return found.masked_fill(absent.unsqueeze(-1), 0)


def _add_once(model: nn.Module, plan: Plan) -> None:
    """On all but the first rank a parameter that is added to a share of a sum counts as zero, also in its gradient."""
    for pattern, what in plan.shares.items():
        if what != "value":
            continue
        for _, module, attribute in parameters_of(model, pattern):
            module.register_forward_pre_hook(_zeroed(attribute))
            module.register_forward_hook(_restored(attribute), always_call=True)


def _zeroed(attribute: str) -> Any:
    def before(module: nn.Module, args: Any) -> None:
        module.__dict__[attribute] = module._parameters[attribute] * 0

    return before


def _restored(attribute: str) -> Any:
    def after(module: nn.Module, args: Any, output: Any) -> None:
        module.__dict__.pop(attribute, None)

    return after


def _local_attributes(model: nn.Module, plan: Plan) -> None:
    names = str(plan.options.get("local_attributes", ""))
    for name in filter(None, names.split(",")):
        pattern, path = split_name(model, name)
        for module in modules_of(model, pattern):
            make_local(module, path, plan.mesh.tp)

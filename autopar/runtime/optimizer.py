"""The optimizer of a rank's parameters: as the user builds it, on fp32 masters where the model computes in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import RequestError
from autopar.runtime.zero import local

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(name: str) -> torch.dtype:
    """The dtype a plan computes in. Raises RequestError for those that are not carried out."""
    if name not in DTYPES:
        raise RequestError(
            f"dtype {name} is not carried out by this runtime (fp16 needs loss scaling): {', '.join(DTYPES)}"
        )
    return DTYPES[name]


ELEMENTWISE = frozenset(
    (
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.SGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
)
"""Optimizers whose update of an element looks at no other element: a rank's part is to them a tensor like any other, and the
detour of every operator through DTensor, which costs more than the update of a small part, can be left out."""


class Optimizer:
    """Steps `parameters`, through fp32 copies of them where they hold 16 bits."""

    def __init__(self, parameters: list[nn.Parameter], build: BuildOptimizer | None) -> None:
        build = build or torch.optim.AdamW
        self.parameters = parameters
        self.masters = [self._master(parameter) for parameter in parameters]
        self.stepped = self.masters
        """What the optimizer knows: masters, or a rank's part of each."""
        self.inner = build(self.stepped)
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise RequestError(
                f"build_optimizer(params) returned {type(self.inner).__name__}, expected a torch.optim.Optimizer over params"
            )
        if type(self.inner) in ELEMENTWISE and any(isinstance(master, DTensor) for master in self.masters):
            self.stepped = [self._part(master) for master in self.masters]
            self.inner = build(self.stepped)

    @staticmethod
    def _master(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)

    @staticmethod
    def _part(master: nn.Parameter) -> nn.Parameter:
        """A parameter over the same memory."""
        if not isinstance(master, DTensor):
            return master
        return nn.Parameter(local(master.detach()), requires_grad=master.requires_grad)

    def step(self) -> None:
        """One update; gradients are gone afterwards."""
        for parameter, stepped in zip(self.parameters, self.stepped, strict=True):
            if parameter is not stepped and parameter.grad is not None:
                same = isinstance(stepped, DTensor) == isinstance(parameter.grad, DTensor)
                gradient = parameter.grad if same else local(parameter.grad)
                stepped.grad = gradient.to(stepped.dtype)
        self.inner.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    local(parameter).copy_(local(master))
        for tensor in (*self.parameters, *self.stepped):
            tensor.grad = None

    def refresh_masters(self) -> None:
        """Take the parameters' values as the masters'."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    local(master).copy_(local(parameter))

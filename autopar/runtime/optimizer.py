"""The optimizer of a rank's parameters: as the user builds it, on fp32 masters where the model computes in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

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


class Optimizer:
    """Steps `parameters`, through fp32 copies of them where they hold 16 bits."""

    def __init__(self, parameters: list[nn.Parameter], build: BuildOptimizer | None) -> None:
        self.parameters = parameters
        self.masters = [self._master(parameter) for parameter in parameters]
        self.inner = (build or torch.optim.AdamW)(self.masters)

    @staticmethod
    def _master(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype not in (torch.bfloat16, torch.float16):
            return parameter
        return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)

    def step(self) -> None:
        """One update; gradients are gone afterwards."""
        pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self.inner.step()
        with torch.no_grad():
            for parameter, master in pairs:
                local(parameter).copy_(local(master))
                master.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def refresh_masters(self) -> None:
        """Take the parameters' values as the masters'."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    local(master).copy_(local(parameter))

"""Whole numbers that a model's code reads where a rank's share of them is meant.

A head count stands in an attribute of a module, or in an object that the module holds (its configuration): the path is then
``config.num_heads``. Such an object may be shared by all modules, so each gets a copy of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, TypeGuard

from torch import nn

from autopar.runtime.names import modules_of


def counts(module: nn.Module, degree: int) -> Iterator[str]:
    """Paths of the whole numbers that the degree divides: the module's own, then those its code reads off what it holds."""
    named = vars(module)
    yield from (name for name, value in named.items() if _is_count(value, degree))
    read = _names_read(type(module))
    for holder, held in named.items():
        if holder in read and _is_plain_object(held):
            yield from (f"{holder}.{name}" for name in sorted(read) if _is_count(_stored(held, name), degree))


def make_local(module: nn.Module, path: str, degree: int) -> Callable[[], None] | None:
    """Divide a count; returns what undoes it, None where the module has no such count."""
    holder, _, name = path.rpartition(".")
    owner: Any = getattr(module, holder, None) if holder else module
    value = getattr(owner, name, None)
    if not _is_count(value, degree):  # blocks of one list need not all hold the same
        return None
    if not holder:
        setattr(module, name, value // degree)
        return lambda: setattr(module, name, value)
    own = copy.copy(owner)
    setattr(own, name, value // degree)
    setattr(module, holder, own)
    return lambda: setattr(module, holder, owner)


@contextmanager
def names_read(module: nn.Module) -> Iterator[set[str]]:
    """Names of the attributes that are read of a module while this is open."""
    kind, read = type(module), set[str]()
    found: Any = kind.__getattribute__

    def noting(self: nn.Module, name: str) -> Any:
        read.add(name)
        return found(self, name)

    module.__class__ = type(kind.__name__, (kind,), {"__getattribute__": noting, "__module__": kind.__module__})
    try:
        yield read
    finally:
        module.__class__ = kind


def split_name(model: nn.Module, name: str) -> tuple[str, str]:
    """``layers.*.attention.config.num_heads`` as the module's name and the path of the count."""
    module, _, path = name.rpartition(".")
    if not modules_of(model, module):
        module, _, holder = module.rpartition(".")
        path = f"{holder}.{path}"
    return module, path


def _is_count(value: Any, degree: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1 and value % degree == 0


def _stored(held: Any, name: str) -> Any:
    """A value that may be set anew: not one that is computed."""
    return None if isinstance(getattr(type(held), name, None), property) else getattr(held, name, None)


def _is_plain_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)


def _names_read(kind: type) -> set[str]:
    """Names that the methods of a class mention, its parents' up to torch's included."""
    found: set[str] = set()
    for parent in kind.__mro__:
        if parent is nn.Module:
            break
        for method in vars(parent).values():
            function = unwrap(method) if isinstance(method, FunctionType) else None
            if isinstance(function, FunctionType) and function.__name__ != "__init__":
                found |= _names_in(function.__code__)
    return found


def _names_in(code: CodeType) -> set[str]:
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*(_names_in(part) for part in inner))

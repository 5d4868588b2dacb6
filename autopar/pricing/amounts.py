"""Sizes of many things at once: each is a sum of terms, evaluated together in numpy.

    amount[owner] = sum over its terms of coefficient * prod(sizes of atoms) / degree (where divided) * width (where compute)

`degree` is the axis's; `width` the bytes of one element of the training dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
COMPUTE = "compute"


class Amounts:
    """Terms of `count` owners; add all terms, then evaluate as often as wanted."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._owners: list[int] = []
        self._coefficients: list[float] = []
        self._atoms: list[tuple[int, ...]] = []
        self._divided: list[bool] = []
        self._compute: list[bool] = []
        self._built: tuple[NDArray[np.intp], NDArray[np.intp], Floats, Floats, Floats, NDArray[np.intp]] | None = None

    def add(
        self,
        owner: int,
        atoms: Iterable[int],
        *,
        coefficient: float = 1.0,
        divided: bool = False,
        compute: bool = False,
    ) -> None:
        """One more term of an owner."""
        self._owners.append(owner)
        self._coefficients.append(coefficient)
        self._atoms.append(tuple(atoms))
        self._divided.append(divided)
        self._compute.append(compute)
        self._built = None

    def evaluate(self, sizes: Mapping[int, float] | Floats, degree: float, width: float) -> Floats:
        """Amount of every owner. `sizes` as an array is indexed by atom id, with a 1 at its end."""
        if not self._owners:
            return np.zeros(self.count)
        if self._built is None:
            self._built = self._build()
        flat, starts, coefficients, divided, compute, owners = self._built
        vector = sizes if isinstance(sizes, np.ndarray) else size_vector(sizes)
        products = np.multiply.reduceat(vector[flat], starts) * coefficients
        products = products * (1.0 + divided * (1.0 / degree - 1.0)) * (1.0 + compute * (width - 1.0))
        return np.asarray(np.bincount(owners, weights=products, minlength=self.count), dtype=np.float64)

    def _build(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats, Floats, Floats, NDArray[np.intp]]:
        # Every term starts with atom -1, of size 1: reduceat knows no empty runs.
        lengths = np.array([len(atoms) + 1 for atoms in self._atoms], dtype=np.intp)
        flat = np.array([atom for atoms in self._atoms for atom in (-1, *atoms)], dtype=np.intp)
        starts = np.concatenate([np.zeros(1, dtype=np.intp), np.cumsum(lengths)[:-1]])
        return (
            flat,
            starts,
            np.array(self._coefficients, dtype=np.float64),
            np.array(self._divided, dtype=np.float64),
            np.array(self._compute, dtype=np.float64),
            np.array(self._owners, dtype=np.intp),
        )


def size_vector(sizes: Mapping[int, float]) -> Floats:
    """Sizes by atom id, and a 1 at the end."""
    vector = np.ones(max(sizes, default=-1) + 2, dtype=np.float64)
    for atom, size in sizes.items():
        vector[atom] = size
    return vector

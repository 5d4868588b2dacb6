"""Seconds of a block's kernels on one rank, and of the host that launches them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.documents.graph import RecomputeOption
from autopar.pricing.local import Local
from autopar.pricing.work import Amount, Product, Work, product
from cost_models.compute import (
    ATTENTION_KERNEL,
    HOST_FACTOR,
    attention_seconds,
    gemm_seconds,
    host_seconds,
    pointwise_seconds,
)

VIEW_HOST_SHARE = 0.3
"""Host work of a view against that of an operator with a kernel."""


MERGE_BYTES = {"forward": 42.0, "backward": 66.0}
"""Traffic per element of the queries and piece of attention, counted off torch's `_SDPAMerger` and
`_templated_ring_attention_backward`: results widened, weighed and subtracted in fp32; gradients added to fp32 ones, copied
where half of a piece counts, flattened into the buffer that is sent."""


class Kernels(Local):
    """What runs on the device, and what the host needs to issue it."""

    def _seconds(self, kernels: Sequence[Sequence[Work]]) -> Amount:
        loss = self._loss_operators()
        alone = [list(group) for group in kernels if not any(work.operator.id in loss for work in group)]
        seconds: Amount = sum((self._kernel(group) for group in alone), 0.0)
        if len(alone) == len(kernels):
            return seconds
        # scores are read once on the way forward; on the way back once more, and their gradient takes their place
        passes = 1 if kernels[0][0].operator.phase == "forward" else 2
        return seconds + pointwise_seconds(self.setting.chip, passes * self._scores(), "loss")

    def _loss_operators(self) -> frozenset[int]:
        """Pointwise operators on a model's scores, where the loss is one kernel."""
        scores = self._scores_tensor()
        if scores is None or not self.executor.fused_loss:
            return frozenset()
        atoms = set(self.block_class.tensor_by_id[scores].atoms)
        return frozenset(
            work.operator.id
            for work in self.sized.works
            if work.kind not in ("matmul", "attention", "view")
            and any(
                set(self.block_class.tensor_by_id[tensor].atoms) == atoms
                for tensor in (*work.operator.reads, *work.operator.writes)
            )
        )

    def _again(self, option: RecomputeOption) -> tuple[Amount, float]:
        """Seconds of running again what an entry of the menu does not keep: the device's, the host's."""
        wanted = set(option.operators)
        if not wanted:
            return 0.0, 0.0
        if option.name == "full" and not self.executor.recompute_stops_early:
            wanted = {work.operator.id for work in self.sized.works if work.operator.phase == "forward"}
        groups = [[work for work in group if work.operator.id in wanted] for group in self.sized.forward]
        groups = [group for group in groups if group]
        host = self._launching(groups) + self.executor.checkpoint_seconds
        seconds = self._seconds(groups)
        if option.name.startswith("selective") and self.executor.selective_products:
            kept = [[work] for work in self.sized.works if work.operator.phase == "forward"]
            kept = [group for group in kept if group[0].kind == "matmul" and group[0].operator.id not in wanted]
            seconds = seconds + self.executor.selective_products * self._seconds(kept)
        return seconds, host

    def _accumulation_seconds(self) -> float:
        """Adding the gradients of a micro-batch to their accumulators, where no product does it."""
        moved = self.executor.accumulation_bytes(self.setting.dtype) * self._parameters(trainable=True)
        return float(pointwise_seconds(self.setting.chip, moved, "add")) if moved else 0.0

    def _kernel(self, group: list[Work]) -> Amount:
        """Device seconds of one kernel on one rank."""
        work, chip = group[0], self.setting.chip
        share = self._share(work.operator)
        if len(group) > 1:
            tensors = self.sized.external[self._leader(group)]
            moved = sum((self._local_bytes(tensor, group) for tensor in tensors), 0.0)
            kind = next((w.kind for w in group if w.kind in ("norm", "softmax", "loss")), group[0].kind)
            return pointwise_seconds(chip, moved, kind)
        if work.kind == "view":
            return 0.0
        if work.kind == "matmul":
            return self._matmul(work)
        if work.kind == "attention":
            attributes = work.operator.attributes
            return self._merging(work) + attention_seconds(
                chip,
                work.flops * share * self.setting.cp,  # own queries meet every rank's keys
                work.bytes * share,
                phase=work.operator.phase,
                seq=self._positions(work),
                head_dim=int(attributes["head_dim"]),
                causal=bool(attributes["causal"]),
                dtype=self.setting.activations,
                kernel=self.executor.attention_kernel or ATTENTION_KERNEL[self.setting.kernels],
            )
        return pointwise_seconds(chip, self._moved(work), work.kind)

    def _positions(self, work: Work) -> Amount:
        """Positions that an attention call works on: of queries or of keys, whichever are fewer."""
        query = 0 if work.operator.phase == "forward" else 1
        pair = (self.block_class.tensor_by_id[read].dims[2] for read in work.operator.reads[query : query + 2])
        queries, keys = (product([self.sizes[atom] for atom in atoms]) for atoms in pair)
        return np.minimum(queries, keys)

    def _merging(self, work: Work) -> Amount:
        """Eager kernels between the pieces of a divided attention, for each piece but the first."""
        pieces = self.setting.cp - 1
        if not pieces or not self.executor.ring_in_fp32:
            return 0.0
        queries = self._bytes(work.operator.reads[0]) / self.width * self._share(work.operator)
        return pieces * pointwise_seconds(self.setting.chip, MERGE_BYTES[work.operator.phase] * queries, "add")

    def _leader(self, group: list[Work]) -> int:
        """The first operator of the whole fused group that `group` is (a part of)."""
        ids = {work.operator.id for work in group}
        for kernels in (self.sized.forward, self.sized.backward):
            for whole in kernels:
                if len(whole) > 1 and ids <= {work.operator.id for work in whole}:
                    return whole[0].operator.id
        raise KeyError(ids)

    def _matmul(self, work: Work) -> Amount:
        return sum((self._product(work, each) for each in work.products), 0.0)

    def _product(self, work: Work, one: Product) -> Amount:
        atom = self.divided.get(work.operator.id)
        letters: dict[str, Amount] = {"m": 1.0, "n": 1.0, "k": 1.0, "b": 1.0}
        pending = atom is not None
        for own, size, letter in one.dims:
            if pending and own == atom:
                size, pending = size / self.setting.degree, False
            letters[letter] = letters[letter] * size
        m, n, k, b = (letters[letter] for letter in "mnkb")
        chip = self.setting.chip
        if work.is_convolution:
            moved = self._moved(work) / len(work.products)
            return gemm_seconds(chip, m, n, k, self.setting.activations, one.layout, b, bytes_=moved)
        grouped = "grouped" in work.operator.name
        if grouped:
            m, n, k, b = self._by_expert(m, n, k, one.layout == "wgrad", atom is not None)
        narrow = work.is_linear and not self.is_end
        dtype = self.setting.dtype if narrow else self.setting.activations
        seconds = gemm_seconds(chip, m, n, k, dtype, one.layout, b, grouped)
        if dtype != self.setting.activations and one.layout != "wgrad":
            seconds = seconds + self._cast_seconds(one, m * b if grouped else m, n, k, b)
        return seconds

    def _by_expert(
        self, m: Amount, n: Amount, k: Amount, sums_rows: bool, divided: bool
    ) -> tuple[Amount, Amount, Amount, Amount]:
        """A grouped product as a batch of one product an expert, a rank's rows spread evenly over its own.

        Without tp inside experts each tp rank has its own rows for whole matrices instead of all rows for parts of them.
        """
        count = max((self.sizes[expert] for expert in self.experts), default=1.0)
        widen = self.setting.degree if divided and self.setting.etp == 1 else 1
        load = self.setting.imbalance
        if sums_rows:
            return m, n * widen, np.maximum(k * load / count / widen, 1.0), count
        return np.maximum(m * load / count / widen, 1.0), n * widen, k, count

    def _cast_seconds(self, one: Product, m: Amount, n: Amount, k: Amount, experts: Amount) -> Amount:
        """To fp8: rows that enter a product are read in two bytes, and written in one as they are and transposed.

        Where weights are not kept in fp8 over a step, they are read and written for every use.
        """
        rows = m * k if one.layout == "forward" else np.minimum(m * k, m * n)
        weights = 3.0 * n * k * experts if self.executor.casts_weights else 0.0
        return pointwise_seconds(self.setting.chip, (4.0 * rows + weights) * self.executor.cast_share, "copy")

    def _launching(self, kernels: Sequence[Sequence[Work]]) -> float:
        views = sum(len(group) == 1 and group[0].kind == "view" for group in kernels)
        count = len(kernels) - views + VIEW_HOST_SHARE * views
        seconds = float(host_seconds(self.setting.chip, count, self.setting.kernels))
        return seconds * self.executor.host_factor / HOST_FACTOR[self.executor.kernels]

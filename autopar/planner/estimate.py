"""The estimate of a step: what the planner minimises and the certificate is about.

    step = (m - 1/v) g(sum_c max_i W_ic) + (1/v) sum_ic W_ic + max_i E_i + 2 (p v - 1) s + stalls

W_ic: seconds of chunk c of stage i per micro-batch (forward, backward, recompute, exposed collectives, embedding and head
included): stages take their chunks in step, p micro-batches each, so every chunk waits for its slowest stage. E_i: once a
step (exposed gradient reduction and parameter gather, optimizer); s: a send; m micro-batches, v chunks per stage. For equal
stages without sends this is the closed form of 1F1B and of the interleaved schedule (Narayanan et al., arXiv 2104.04473).
Sends have a stream of their own, forward and gradient in turn, so that

    1F1B          g(W) = W, stalls = 2 s (m - 1 - ceil((m - 1) / p))
    GPipe         g(W) = max(f W, s) + max((1 - f) W, s), stalls = 0        f: the forward's share of W
    interleaved   g(W) = max(W, 2 v s), stalls = 0

1F1B stalls because a stage i may run only p - i micro-batches ahead of their gradients: a way down n stages and back takes n
actions and 2 (n - 1) sends and lets n more micro-batches in; the longest path goes whole ways and one of what is left.
Interleaved stages run further ahead, which hides sends until they fill the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from cost_models.in_flight import Schedule


@dataclass(frozen=True)
class StageChoice:
    """A stage with given blocks: seconds of each chunk per micro-batch, seconds per step, and the recompute mix."""

    chunks: tuple[float, ...]
    once: float
    mix: tuple[tuple[str, tuple[int, ...]], ...]
    """Class -> how many of its blocks take each entry of the class's menu."""

    @property
    def work(self) -> float:
        """Seconds per micro-batch, all chunks together."""
        return sum(self.chunks)


@dataclass(frozen=True)
class Pipeline:
    """The numbers of a configuration that the objective needs."""

    stages: int
    micro_batches: int
    virtual_stages: int
    send_seconds: float
    schedule: Schedule = "1f1b"
    forward_share: float = 1 / 3
    """Of a stage's work."""

    @property
    def rounds(self) -> float:
        """How often the busiest stage's pace counts beside the sum."""
        return self.micro_batches - 1 / self.virtual_stages

    @property
    def sends_seconds(self) -> float:
        """Sends that nothing hides: the first micro-batch down all chunks, the last gradient back, 1F1B's stalls."""
        fill = self.stages * self.virtual_stages - 1
        more = self.micro_batches - 1
        stalls = more - ceil(more / self.stages) if self.schedule == "1f1b" else 0
        return 2 * (fill + stalls) * self.send_seconds

    @cached_property
    def pace_lines(self) -> tuple[tuple[float, float], ...]:
        """(slope, constant) whose largest value at W is the pace g(W)."""
        s, f = self.send_seconds, self.forward_share
        if s == 0 or self.schedule == "1f1b":
            return ((1.0, 0.0),)
        if self.schedule == "gpipe":
            return ((1.0, 0.0), (f, s), (1 - f, s), (0.0, 2 * s))
        return ((1.0, 0.0), (0.0, 2 * self.virtual_stages * s))

    def pace(self, work: float, least: bool = False) -> float:
        """Seconds per micro-batch at which a pipeline runs whose busiest stage takes `work`; `least`: or its link, not both."""
        return max(slope * work + constant for slope, constant in self.pace_lines if not least or slope in (0, 1))

    def step_seconds(self, stages: Sequence[Sequence[float]], once: float) -> float:
        """The objective, from seconds of each stage's chunks and the longest that a stage spends once a step."""
        slowest = sum(max(chunk) for chunk in zip(*stages, strict=True))
        total = sum(sum(chunks) for chunks in stages)
        return self.step_of(slowest, total, once)

    def step_of(self, slowest: float, total: float, once: float) -> float:
        """The objective, from the slowest of each chunk together, all work together, and the longest once a step."""
        return self.rounds * self.pace(slowest) + total / self.virtual_stages + once + self.sends_seconds

    def most_work(self, limit: float, least_total: float) -> float:
        """W beyond which no stage may go if the step is to stay below `limit`; `least_total` bounds sum W from below."""
        free = limit - least_total / self.virtual_stages - self.sends_seconds
        if self.rounds == 0:
            return float("inf")
        pace = free / self.rounds
        if any(slope == 0 and constant > pace for slope, constant in self.pace_lines):
            return 0.0
        return min((pace - constant) / slope for slope, constant in self.pace_lines if slope > 0)


def chunk_sizes(blocks: int, pipeline: Pipeline, stage: int) -> tuple[int, ...]:
    """Blocks of each chunk of a stage: equal but for one; the larger ones are the last, which keep fewest micro-batches.

    On the last stage the very last is larger only if all others are, since the head stands in it.
    """
    v = pipeline.virtual_stages
    size, larger = divmod(blocks, v)
    spared = int(v > 1 and stage == pipeline.stages - 1)
    return (size,) * (v - larger - spared) + (size + 1,) * larger + (size,) * spared

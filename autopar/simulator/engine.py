"""The engine: every rank runs its list of actions on four first-in first-out streams.

    compute     an action begins when the one before it has ended and its input has arrived
    collective  tp, cp, ep collectives, inside their action (`tasks`)
    dp          a gather is launched when the action before its own has ended, input or no input, so idle time hides it;
                a reduction runs beside its backward and on behind it; one at a time
    send        a hidden state (or its gradient) leaves when its action ends and the send before it has left

Since each stream's order is fixed by the rank's own list, times are longest paths in a graph without cycles: whichever
runnable rank goes first, the numbers are the same, so the replay is deterministic. Ranks that can run wait in a queue.

Of a dp collective within an action, `head` (of the first gather) or `tail` (of the last reduction) lies bare; of the
rest the fraction 1 - dp_overlap takes the rank's time, and what is hidden must still fit beside compute: an action does
not end before its parameters are there, and the optimizer waits for the last reduction. What a reduction takes holds up
the rank that reduces, not the gradient that it sends on (`_beside_dp`, `_update`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.documents.plan import Plan
from autopar.simulator.schedules import Order, orders
from autopar.simulator.tasks import DpWork, Task, data_parallel, tasks

NOT_YET = -1.0


@dataclass(slots=True)
class Transfer:
    """A gather, reduction or send: arrays of one rank."""

    kind: list[str] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    micro_batch: list[int] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, kind: str, stage: int, micro_batch: int, start: float, seconds: float) -> None:
        """Note one transfer; nothing where it takes no time."""
        if seconds > 0:
            self.kind.append(kind)
            self.stage.append(stage)
            self.micro_batch.append(micro_batch)
            self.start.append(start)
            self.seconds.append(seconds)


@dataclass(slots=True)
class Rank:
    """One pp rank: its list, how far it has come, and what it has noted. Times in seconds from the step's start."""

    number: int
    order: Order
    tasks: list[tuple[Task, Task]]
    dp_work: dict[int, DpWork]
    dp_overlap: float
    optimizer_seconds: float
    free: float = 0.0
    """When the compute stream is free."""
    dp_free: float = 0.0
    send_free: float = 0.0
    begins: list[float] = field(default_factory=list)
    """When each action's own work began."""
    starts: list[float] = field(default_factory=list)
    """When each action took the compute stream: earlier than `begins` where it first waited for parameters."""
    ends: list[float] = field(default_factory=list)
    sends: Transfer = field(default_factory=Transfer)
    dp: Transfer = field(default_factory=Transfer)
    pp_seconds: float = 0.0
    """Waited while the input was on its way."""
    bubble_seconds: float = 0.0
    """Waited while the input was not even computed."""
    dp_seconds: float = 0.0
    """Waited, or was held up, by dp collectives."""
    optimizer_start: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What happened on every rank, and how long the step took."""

    ranks: list[Rank]
    step_seconds: float


class _Pipeline:
    """Who has what when: arrival times by [backward][virtual stage][micro-batch]."""

    def __init__(self, plan: Plan) -> None:
        pp, schedule = plan.mesh.pp, plan.schedule
        self.pp = pp
        self.stages = pp * schedule.virtual_stages
        self.arrival = [[[NOT_YET] * schedule.micro_batches for _ in range(self.stages)] for _ in (0, 1)]
        self.produced = [[[NOT_YET] * schedule.micro_batches for _ in range(self.stages)] for _ in (0, 1)]
        self.arrival[0][0] = [0.0] * schedule.micro_batches
        self.arrival[1][-1] = [0.0] * schedule.micro_batches
        self.send_seconds = [
            plan.costs[stage % pp].chunks[stage // pp].send_seconds if pp > 1 else 0.0 for stage in range(self.stages)
        ]


def run(plan: Plan, slow: Mapping[int, float]) -> Run:
    """Replay one step of `plan`; `slow` multiplies the compute of some pp ranks."""
    schedule = plan.schedule
    lists = orders(schedule.name, plan.mesh.pp, schedule.micro_batches, schedule.virtual_stages)
    work = tasks(plan, slow)
    ranks = [
        Rank(
            number, lists[number], work[number], data_parallel(cost, lists[number]), cost.dp_overlap,
            cost.optimizer_seconds * slow.get(number, 1.0),
        )
        for number, cost in enumerate(plan.costs)
    ]  # fmt: skip
    pipeline = _Pipeline(plan)
    queue = deque(range(len(ranks)))
    while queue:
        for woken in _advance(ranks[queue.popleft()], pipeline):
            if woken not in queue:
                queue.append(woken)
    for rank in ranks:
        assert len(rank.ends) == len(rank.order), "a schedule waits for itself"
        _update(rank)
    return Run(ranks, max(rank.free for rank in ranks))


def _advance(rank: Rank, pipeline: _Pipeline) -> list[int]:
    """Run `rank` until it lacks an input; returns the ranks it sent to."""
    woken: dict[int, None] = {}
    pp, number, begins, starts, ends = pipeline.pp, rank.number, rank.begins, rank.starts, rank.ends
    for i in range(len(ends), len(rank.order)):
        backward, chunk, micro_batch = rank.order[i]
        stage = chunk * pp + number
        arrival = pipeline.arrival[backward][stage][micro_batch]
        if arrival == NOT_YET:
            break
        start = rank.free
        if arrival > start:
            on_its_way = arrival - max(start, pipeline.produced[backward][stage][micro_batch])
            rank.pp_seconds += on_its_way
            rank.bubble_seconds += arrival - start - on_its_way
            start = arrival
        work = rank.tasks[chunk][backward]
        if i in rank.dp_work:
            begin, end, free = _beside_dp(rank, rank.dp_work[i], start, work.seconds, stage, micro_batch)
            rank.dp_seconds += free - start - work.seconds
        else:
            begin, end = start, start + work.seconds
            free = end
        starts.append(start)
        begins.append(begin)
        ends.append(end)
        rank.free = free
        target = stage - 1 if backward else stage + 1
        if 0 <= target < pipeline.stages:
            _deliver(rank, pipeline, backward, stage, target, micro_batch, end)
            if target % pp != number:
                woken[target % pp] = None
    return list(woken)


def _deliver(
    rank: Rank, pipeline: _Pipeline, backward: bool, stage: int, target: int, micro_batch: int, end: float
) -> None:
    """Send the result of the action that ended at `end`; chunks of one rank pass it on at once."""
    arrival = end
    if target % pipeline.pp != rank.number:
        start = max(rank.send_free, end)
        seconds = pipeline.send_seconds[min(stage, target)]
        arrival = rank.send_free = start + seconds
        rank.sends.add("send_backward" if backward else "send_forward", stage, micro_batch, start, seconds)
    pipeline.produced[backward][target][micro_batch] = end
    pipeline.arrival[backward][target][micro_batch] = arrival


def _beside_dp(
    rank: Rank, dp: DpWork, start: float, own: float, stage: int, micro_batch: int
) -> tuple[float, float, float]:
    """Begin and end of an action that has dp collectives beside it, and when the compute stream is free again."""
    bare = 1.0 - rank.dp_overlap
    begin, end = start, start + own
    if dp.gather:
        # rank.free is still the end of the action before.
        gather_start = max(rank.free, rank.dp_free)
        rank.dp_free = gather_start + dp.gather
        rank.dp.add("gather", stage, micro_batch, gather_start, dp.gather)
        head = max(0.0, gather_start + dp.head - start) if dp.head else 0.0
        left = min(dp.gather, max(0.0, rank.dp_free - start))
        begin = start + head + bare * max(0.0, left - head)
        end = max(begin + own, rank.dp_free)
    free = end
    if dp.reduce:
        free += bare * (dp.reduce - dp.tail)
        rank.dp_free = max(max(begin, rank.dp_free) + dp.reduce, free + dp.tail)
        rank.dp.add("reduce", stage, micro_batch, rank.dp_free - dp.reduce, dp.reduce)
    return begin, end, free


def _update(rank: Rank) -> None:
    """The optimizer, when the last reduction has ended."""
    if rank.dp_free > rank.free:
        rank.dp_seconds += rank.dp_free - rank.free
        rank.free = rank.dp_free
    rank.optimizer_start = rank.free
    rank.free += rank.optimizer_seconds

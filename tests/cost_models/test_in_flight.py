import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.in_flight import activation_peak, in_flight, in_flight_by_chunk


def fullest(pipeline_order, chunks, weights):
    """Replay a rank's own list of actions: the most that is held at once."""
    held, most = [0] * chunks, 0.0
    for chunk, forward in pipeline_order:
        held[chunk] += 1 if forward else -1
        most = max(most, sum(h * w for h, w in zip(held, weights, strict=True)))
    return most


def torchs_order(stages, micro_batches, chunks):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    from torch.distributed.pipelining.schedules import FORWARD

    for actions in visualizer.get_schedule_ops("Interleaved1F1B", stages, micro_batches, chunks):
        yield [(a.stage_index // stages, a.computation_type == FORWARD) for a in actions if a is not None]


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"),
    [(2, 4, 2), (4, 8, 2), (4, 4, 3), (4, 16, 4), (8, 16, 2), (4, 10, 3), (4, 3, 2)],
)
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (5, 1, 1, 2), (1, 1, 3, 7)])
def test_interleaved_activation_peak_is_that_of_torchs_own_order(stages, micro_batches, chunks, weights):
    for rank, order in enumerate(torchs_order(stages, micro_batches, chunks)):
        expected = fullest(order, chunks, weights[:chunks])
        assert activation_peak("interleaved", rank, stages, micro_batches, weights[:chunks]) == expected


@given(st.integers(1, 64), st.integers(1, 256), st.data())
def test_one_f_one_b_holds_as_many_as_there_are_stages_behind(stages, micro_batches, data):
    stage = data.draw(st.integers(0, stages - 1))
    assert in_flight("1f1b", stage, stages, micro_batches) == (min(micro_batches, stages - stage),)
    assert in_flight("gpipe", stage, stages, micro_batches) == (micro_batches,)


@given(st.integers(2, 32), st.integers(2, 8), st.integers(2, 6))
@settings(max_examples=50)
def test_the_first_interleaved_rank_holds_korthikantis_factor_more(stages, rounds, chunks):
    # arXiv 2205.05198, section 4.2.3: 1 + (p - 1)/(p v) times what 1F1B holds, a chunk being 1/v of a stage
    held = sum(in_flight("interleaved", 0, stages, rounds * stages, chunks)) / chunks
    assert held == pytest.approx(stages * (1 + (stages - 1) / (stages * chunks)))


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 5), st.data())
def test_no_chunk_holds_more_than_all_micro_batches(stages, micro_batches, chunks, data):
    stage = data.draw(st.integers(0, stages - 1))
    counts = in_flight_by_chunk("interleaved", stage, stages, micro_batches, chunks)
    assert counts.min() >= 0
    assert counts.max() <= micro_batches

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_runs import predict_all, score_folder
from runs_pricing import predict
from runs_scores import spearman, summary
from runs_table import COLUMNS, Skip, one_release_each, read_folder, run_of

TINY = {
    "id": "tiny", "model": "tiny", "layers": 8, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 1024, "seq_len": 512,
    "gpu": "A100-80GB", "gpus": 8, "gpus_per_node": 8, "framework": "Megatron-LM", "dtype": "bf16", "global_batch": 64,
    "micro_batch": 1, "zero_stage": 1, "recompute": "none", "step_time_s": 1.0, "tier": "A",
}  # fmt: skip
MOE = {"gated_mlp": 1, "experts": 8, "topk": 2, "moe_ffn": 1024}


def run(**changes):
    return run_of({name: str(value) for name, value in {**TINY, **changes}.items()}, "tiny_file", "tiny")


def csv_of(*rows):
    lines = [",".join(COLUMNS)]
    lines += [",".join(str({**TINY, **row}.get(name, "")) for name in COLUMNS) for row in rows]
    return "\n".join(lines)


def test_degrees_that_do_not_make_the_devices_are_refused_with_the_arithmetic():
    with pytest.raises(Skip, match=r"tp\(2\) \* pp\(2\) \* cp\(1\) \* dp\(4\) = 16, but gpus = 8"):
        run(tp=2, pp=2, dp=4)


def test_a_chip_that_is_not_known_is_named():
    with pytest.raises(Skip, match="chip not known: TPUv9"):
        predict(run(gpu="TPUv9"))


def test_a_framework_that_is_not_known_is_named():
    with pytest.raises(Skip, match="framework not known: abacus"):
        predict(run(framework="abacus"))


def test_bad_rows_are_reported_and_good_ones_kept(tmp_path):
    (tmp_path / "mine.csv").write_text(csv_of({}, {"id": "odd", "layers": "many"}, {"id": "none", "hidden": ""}))
    (tmp_path / "other.csv").write_text("id,layers\nx,3\n")
    runs, skipped = read_folder(tmp_path)
    assert [one.id for one in runs] == ["tiny"]
    assert {(name, why.kind) for _, name, why in skipped} == {
        ("odd", "unreadable"), ("none", "not stated"), ("x", "missing columns")
    }  # fmt: skip


BAD = [
    ({"step_time_s": "nan"}, "unreadable", "step_time_s = nan"),
    ({"step_time_s": "-1"}, "contradictory", "step_time_s = -1"),
    ({"step_time_s": "0"}, "contradictory", "step_time_s = 0"),
    ({"peak_mem_gib": "inf"}, "unreadable", "peak_mem_gib = inf"),
    ({"inter_link_gbps_per_gpu": "-400"}, "contradictory", "inter_link_gbps_per_gpu = -400"),
    ({"layers": "nan"}, "unreadable", "layers = nan"),
    ({"layers": "-8"}, "contradictory", "layers = -8"),
    ({"layers": "7.5"}, "unreadable", "layers = 7.5 is no count"),
    ({"gpus": "0"}, "contradictory", "gpus = 0"),
    ({"tp": "0"}, "contradictory", "tp = 0"),
    ({"tp": "3"}, "contradictory", r"tp\(3\) \* pp\(1\) \* cp\(1\) = 3 does not divide gpus\(8\)"),
    ({"micro_batch": "0"}, "contradictory", "micro_batch = 0"),
    ({"zero_stage": "4"}, "contradictory", "zero_stage = 4"),
    ({"kv_heads": "3"}, "contradictory", r"kv_heads\(3\) does not divide heads\(8\)"),
    ({"experts": "2", "topk": "4"}, "contradictory", r"topk\(4\) of experts\(2\)"),
    ({"recompute": "some"}, "unreadable", "recompute = 'some'; allowed: none, selective, full"),
    ({"kernels": "fast"}, "unreadable", "kernels = 'fast'; allowed"),
    ({"schedule": "dualpipe"}, "unreadable", "schedule = 'dualpipe'; allowed"),
    ({"sp": "2"}, "contradictory", "sp = 2"),
    ({"gpu": "TPUv9"}, "chip not known", "TPUv9"),
    ({"gpu": ""}, "chip not known", "none stated"),
    ({"dtype": "fp7"}, "dtype not known", "fp7"),
    ({"framework": "abacus"}, "framework not known", "abacus"),
    ({"pp": "8", "layers": "4"}, "contradictory", r"pp\(8\) \* vp\(1\) = 8 chunks, but 4 layers"),
    ({"gpus": "12", "gpus_per_node": "8"}, "contradictory", r"gpus\(12\) is not a multiple of gpus_per_node\(8\)"),
]


@pytest.mark.parametrize(("changes", "kind", "detail"), BAD, ids=[str(changes) for changes, _, _ in BAD])
def test_an_absurd_row_is_skipped_with_what_is_wrong(changes, kind, detail):
    with pytest.raises(Skip, match=detail) as found:
        predict(run(**changes))
    assert found.value.kind == kind


def test_a_row_with_more_cells_than_columns_is_reported(tmp_path):
    (tmp_path / "mine.csv").write_text(csv_of({}, {"id": "long"}) + ",surplus\n")
    runs, ((_, name, why),) = read_folder(tmp_path)
    assert [one.id for one in runs] == ["tiny"]
    assert (name, why.kind) == ("long", "unreadable")


def test_every_row_is_scored_or_skipped_with_a_reason(tmp_path):
    (tmp_path / "mine.csv").write_text(csv_of({}, *({"id": str(n)} | changes for n, (changes, _, _) in enumerate(BAD))))
    report, scored = score_folder(tmp_path)
    assert [one.run.id for one in scored] == ["tiny"]
    assert sorted(row["id"] for row in report["skipped_rows"]) == sorted(str(n) for n in range(len(BAD)))
    assert report["overall"]["rows"] == len(BAD) + 1
    assert sum(report["overall"]["skipped"].values()) == len(BAD)


def test_a_row_that_fails_is_listed_and_ends_no_other(monkeypatch):
    def broken(one):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("published_runs.predict", broken)
    scored, ((_, name, why),) = predict_all([run()])
    assert not scored
    assert (name, str(why)) == ("tiny", "failed: RuntimeError: out of luck")


def test_of_equal_plans_the_newest_release_counts():
    runs = [run(id=name, release=release) for name, release in (("a", "25.09"), ("b", "26.02.01"), ("c", "26.02"))]
    assert [one.release for one in one_release_each(runs)] == ["26.02.01"]


def test_ties_share_their_rank():
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 2.0])) == pytest.approx(0.866, abs=1e-3)


def test_figures_of_three_rows_by_hand():
    scored = [predict(run(id=str(size), micro_batch=size)) for size in (1, 2, 4)]
    measured = [one.seconds * factor for one, factor in zip(scored, (1.0, 1.25, 2.0), strict=True)]
    scored = [predict(run(micro_batch=size, step_time_s=m)) for size, m in zip((1, 2, 4), measured, strict=True)]
    found = summary(scored, [])
    assert found["median_abs_error"] == pytest.approx(0.2)
    assert found["mean_abs_error"] == pytest.approx((0 + 0.2 + 0.5) / 3)
    assert found["bias"] == pytest.approx(-(0 + 0.2 + 0.5) / 3)


@settings(max_examples=12)
@given(
    st.sampled_from(["none", "selective", "full"]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
    st.sampled_from(["Megatron-LM", "torchtitan", "FSDP", "Megatron-LM 2021"]),
)  # fmt: skip
def test_memory_and_step_grow_with_what_is_asked(recompute, micro_batch, pp, framework):
    small = predict(run(recompute=recompute, micro_batch=micro_batch, pp=pp, framework=framework))
    larger = predict(run(recompute=recompute, micro_batch=2 * micro_batch, pp=pp, framework=framework))
    longer = predict(run(recompute=recompute, micro_batch=micro_batch, pp=pp, framework=framework, global_batch=128))
    assert larger.device_bytes > small.device_bytes
    assert longer.seconds > small.seconds


def test_experts_are_divided_by_ep_and_etp_not_by_tp():
    one, two = (predict(run(**MOE, ep=ep)).breakdown["parameters"] for ep in (2, 4))
    experts = 8 * 3 * 8 * 512 * 1024 * 2  # layers, matrices, experts, hidden, ffn, bytes
    assert one - two == pytest.approx(experts / 4, rel=1e-6)


EXPERTS_BYTES = 8 * 3 * 8 * 512 * 1024 * 2  # layers, matrices, experts, hidden, ffn, bytes of bf16


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_experts_are_divided_by_ep_times_etp_whatever_tp_is(tp, ep, inside):
    etp = tp if inside else 1
    if ep * etp > 8:
        return
    held = predict(run(**MOE, tp=tp, ep=ep, etp=etp)).breakdown["parameters"]
    whole = predict(run(**MOE, tp=tp, ep=1, etp=1)).breakdown["parameters"]
    assert whole - held == pytest.approx(EXPERTS_BYTES * (1 - 1 / (ep * etp)), rel=1e-6, abs=1)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 4]), st.sampled_from([1, 2]))
def test_rows_for_experts_cost_more_the_more_there_are_of_them(micro_batch, topk, tp):
    moe = MOE | {"topk": topk, "ep": 4, "tp": tp, "etp": 1, "seq_len": 2048}
    small = predict(run(**moe, micro_batch=micro_batch))
    more = predict(run(**moe | {"topk": 2 * topk}, micro_batch=micro_batch))
    assert 0 < small.parts["ep"] < more.parts["ep"]
    assert small.breakdown["activations"] < more.breakdown["activations"]
    assert predict(run(**moe | {"ep": 1}, micro_batch=micro_batch)).parts["ep"] == 0


@pytest.mark.parametrize("zero", [0, 1])
def test_deepspeeds_pipelines_average_bf16_gradients_whole(zero):
    """A reduce_scatter moves half of what an all_reduce does: ZeRO 1 of Megatron is cheaper there, DeepSpeed's is not."""
    plan = {"framework": "Megatron-DeepSpeed", "gpus": 16, "zero_stage": zero}
    deepspeed = predict(run(**plan)).parts["dp"]
    halves = predict(run(**plan, dtype="fp16")).parts["dp"]
    assert deepspeed > 1.5 * halves  # fp32 gradients against fp16 ones


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.sampled_from([2048, 8192]))
def test_torchs_ring_of_fp32_costs_more_than_a_gather_and_a_scatter(cp, seq_len):
    plan = {"seq_len": seq_len, "cp": cp, "flash_attention": 1, "kernels": "fused", "recompute": "none"}
    ring, gathered = (predict(run(**plan, framework=name)).parts["cp"] for name in ("torchtitan", "autopar"))
    assert ring > gathered > 0


def test_a_divided_sequence_keeps_less_and_pays_for_keys_and_values():
    whole, divided = (predict(run(seq_len=4096, cp=cp, gpus=8, flash_attention=1)) for cp in (1, 2))
    assert divided.breakdown["activations"] < whole.breakdown["activations"]
    assert divided.parts["cp"] > 0 == whole.parts["cp"]


def test_rows_of_experts_are_not_priced_as_a_dense_layer():
    dense = predict(run(gated_mlp=1, ffn=1024))
    sparse = predict(run(**MOE, ep=1))
    assert sparse.breakdown["activations"] > 1.5 * dense.breakdown["activations"]

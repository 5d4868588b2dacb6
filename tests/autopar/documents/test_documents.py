"""The documents: round trips, published schemas, and errors that name the field."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from autopar.documents import Graph, Plan, Timeline
from autopar.errors import DocumentError

FIXTURES = Path(__file__).parents[2] / "fixtures"
SCHEMAS = Path(__file__).parents[3] / "docs" / "schemas"
DOCUMENTS = {"graph": Graph, "plan": Plan, "timeline": Timeline}


@pytest.fixture(params=DOCUMENTS)
def name(request):
    return request.param


def edited(name, tmp_path, edit):
    data = json.loads((FIXTURES / f"{name}.json").read_text())
    edit(data)
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(data))
    return path


def test_a_saved_document_loads_equal(name, tmp_path):
    document = DOCUMENTS[name].load(FIXTURES / f"{name}.json")
    document.save(tmp_path / "again.json")
    assert DOCUMENTS[name].load(tmp_path / "again.json") == document


def test_the_fixture_satisfies_the_published_schema(name):
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    jsonschema.validate(json.loads((FIXTURES / f"{name}.json").read_text()), schema)


def test_a_document_is_frozen(name):
    document = DOCUMENTS[name].load(FIXTURES / f"{name}.json")
    with pytest.raises(ValueError, match="frozen"):
        document.format = "other"


def test_a_file_cut_off_is_said_so(name, tmp_path):
    path = tmp_path / "cut.json"
    text = (FIXTURES / f"{name}.json").read_text()
    path.write_text(text[: len(text) * 2 // 3])
    with pytest.raises(DocumentError, match="cut off"):
        DOCUMENTS[name].load(path)


def test_a_newer_format_asks_for_an_upgrade(name, tmp_path):
    path = edited(name, tmp_path, lambda data: data.update(format=f"autopar-{name}/9"))
    with pytest.raises(DocumentError, match="newer than this autopar reads"):
        DOCUMENTS[name].load(path)


def test_another_document_is_not_taken_for_this_one(tmp_path):
    with pytest.raises(DocumentError, match="is this a plan file"):
        Plan.load(FIXTURES / "graph.json")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["mesh"].update(tpp=1), r"mesh\.tpp: unknown field \(did you mean 'tp'\?\)"),
        (lambda d: d["schedule"].update(name="1f1"), r"schedule\.name: '1f1' is not allowed \(did you mean '1f1b'\?\)"),
        (lambda d: d["workload"].pop("global_batch"), r"workload\.global_batch: missing"),
        (lambda d: d["mesh"].update(tp="two"), r"mesh\.tp: .*given 'two'"),
        (lambda d: d["mesh"].update(tp=3), r"pp\(2\) \* dp_replicate\(1\) \* dp_shard\(1\) \* cp\(1\) \* tp\(3\) = 6"),
        (lambda d: d["schedule"].update(micro_batches=3), r"micro_batch\(2\) \* micro_batches\(3\) \* dp\(1\) = 6"),
        (lambda d: d["stages"].pop(), "1 stages and 2 costs, but pp is 2"),
    ],
)
def test_a_wrong_edit_of_a_plan_is_named_by_field(tmp_path, edit, message):
    with pytest.raises(DocumentError, match=message):
        Plan.load(edited("plan", tmp_path, edit))


def test_a_missing_file_and_a_binary_one_are_plain_errors(tmp_path):
    with pytest.raises(DocumentError, match="cannot be read as a plan"):
        Plan.load(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\x80\x02\xff\xfe")
    with pytest.raises(DocumentError, match="cannot be read as a plan"):
        Plan.load(tmp_path / "binary.json")


def test_saving_to_a_missing_folder_names_the_path(tmp_path):
    plan = Plan.load(FIXTURES / "plan.json")
    with pytest.raises(DocumentError, match="cannot be written"):
        plan.save(tmp_path / "absent" / "plan.json")


def test_spans_of_unequal_length_are_refused(tmp_path):
    path = edited("timeline", tmp_path, lambda data: data["spans"]["start"].pop())
    with pytest.raises(DocumentError, match="arrays differ in length"):
        Timeline.load(path)


def test_graph_sizes_follow_batch_and_sequence():
    graph = Graph.load(FIXTURES / "graph.json")
    flops = graph.flops("model", 2, 4)
    # per token: 4 blocks of two 8x32 matmuls and a 8x16 head; two FLOPs a multiply-add; backward twice forward
    assert flops == 2 * 4 * 3 * 2 * (4 * 2 * 8 * 32 + 8 * 16)
    assert graph.flops("model", 6, 20) == flops * 15


def test_saved_bytes_of_the_fixture_block_are_its_input_and_two_inner_tensors():
    graph = Graph.load(FIXTURES / "graph.json")
    saved = graph.class_by_name["Mlp"].saved_bytes(graph.sizes(), compute_bytes=2)
    assert saved == 2 * (2 * 4) * (8 + 32 + 32)


def test_a_full_disk_leaves_the_older_file_as_it_was(tmp_path):
    older = tmp_path / "plan.json"
    older.write_text((FIXTURES / "plan.json").read_text())
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from autopar.documents import Plan\n"
        "from autopar.errors import DocumentError\n"
        f"plan = Plan.load({str(older)!r})\n"
        "try:\n"
        f"    plan.save({str(older)!r})\n"
        "except DocumentError as error:\n"
        "    print(error)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "cannot be written: File too large" in done.stdout
    assert older.read_text() == (FIXTURES / "plan.json").read_text()
    assert list(tmp_path.iterdir()) == [older]

"""What people really give wrong: each gets one message that says what to do, a status, and leaves no file behind."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.documents.base import write_atomically
from autopar.errors import DocumentError

ROOT = Path(__file__).parents[2]
GRAPH, PLAN = (ROOT / "tests" / "fixtures" / name for name in ("graph.json", "plan.json"))
MODEL = """
import sys
import torch
from torch import nn
SEQ_LEN = 16
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Embedding(32, 8), nn.Linear(8, 32)
    def forward(self, ids): return self.leave(self.enter(ids))
def build_model(): return Model()
def example_inputs(batch, seq): return (torch.zeros(batch, seq, dtype=torch.long),)
def loss(output, ids): return output.float().mean()
"""


def refused(capsys, *words, status=2):
    """The one message of a command that does nothing."""
    assert main([str(word) for word in words]) == status
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("autopar: ")
    assert "Traceback" not in err
    return err


def plan_words(tmp_path, *words, model=GRAPH, batch=8):
    return ["plan", model, "--cluster", "local-cpu-x4", "--global-batch", batch, "-o", tmp_path / "p.json", *words]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("def broken(:", "SyntaxError"),
        ("raise ValueError('boom')", "boom"),
        ("sys.exit(3)", "SystemExit"),
        ("def build_model(): sys.exit(1)", "build_model() failed"),
        ("def build_model(): return 3", "returned int, expected a torch.nn.Module"),
        ("def build_model(): return nn.ReLU()", "no parameters"),
        ("def build_model(): return nn.Sequential(nn.LazyLinear(3))", "lazy"),
        ("def build_model(): return nn.Sequential(torch.jit.script(nn.Linear(3, 3)))", "torch.jit"),
        ("def build_model(): return Model().requires_grad_(False)", "no trainable parameter"),
        ("Model.forward = lambda self, ids: sys.exit()", "SystemExit"),
        ("def example_inputs(batch): return ()", "example_inputs(batch, seq) failed"),
        ("def example_inputs(batch, seq): return ()", "do not fit the model"),
        ("def example_inputs(batch, seq): return 'text'", "returned str"),
        ("def example_inputs(batch, seq): return (torch.zeros(4, 16).long(),)", "use its `batch`"),
        ("def loss(output, ids): return output.mean(0)", "expected one number"),
        ("def loss(output, ids): return ()", "expected one number"),
        ("def loss(output, ids): return output.argmax()", "no trainable parameter"),
        ("def loss(output, ids): return output.detach().mean()", "no trainable parameter"),
        ("SEQ_LEN = True", "SEQ_LEN"),
    ],
)
def test_a_wrong_model_file(capsys, tmp_path, change, message):
    path = tmp_path / "model.py"
    path.write_text(MODEL + change + "\n")
    assert message in refused(capsys, "capture", path, "-o", tmp_path / "graph.json")
    assert not (tmp_path / "graph.json").exists()


def test_what_a_model_prints_does_not_reach_the_answer(capsys, tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL + "print('hello')\n")
    assert main(["capture", str(path), "-o", str(tmp_path / "graph.json"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["format"] == "autopar-graph/1"
    assert "hello" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not complete JSON"),
        ("[]", "no 'model_type'"),
        ('{"model_type": 5}', "model_type is 5"),
        ('{"model_type": "lama"}', "did you mean 'llama'"),
        ('{"model_type": "llama", "architectures": 1}', "architectures is 1"),
        ('{"model_type": "llama", "num_hidden_layers": -1}', "num_hidden_layers is -1"),
        ('{"model_type": "llama"}', "number of layers is missing"),
        ('{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": "abc"}', "hidden_size"),
    ],
)
def test_a_wrong_configuration(capsys, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    assert message in refused(capsys, "capture", tmp_path, "-o", tmp_path / "graph.json")


@pytest.mark.parametrize("spec", ["", ".", "x" * 5000 + ".py", "no_such_module", "no_such_module:f"])
def test_a_model_that_is_none(capsys, tmp_path, spec):
    refused(capsys, "capture", spec, "-o", tmp_path / "graph.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["captured", "batch"], 0, "captured.batch"),
        (["indices"], [], "no atom has the id"),
        (["chains", 0, "prologue"], "zz", "no block class is named 'zz'"),
        (["chains", 0, "runs", 0, "count"], 1, "do not cover"),
        (["block_classes", 0, "recompute"], [], "no entry 'none'"),
        (["block_classes", 0, "tensors", 0, "dtype"], "float3", "allowed: bfloat16"),
        (["block_classes", 0, "operators", 0, "reads", 0], 999, "no tensor has the id 999"),
        (["block_classes", 0, "operators", 0, "local_dims", 0, "reads", 0, "dim"], 9, "has no dim 9"),
        (["block_classes", 1, "operators", 0, "model_flops", 0, "coefficient"], -1, "coefficient"),
    ],
)
def test_a_graph_edited_wrongly(capsys, tmp_path, path, value, message):
    bad = edited(GRAPH, tmp_path, path, value)
    assert message in refused(capsys, *plan_words(tmp_path, model=bad))
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "autopar-plan/2", "newer"),
        (["format"], "autopar-plan/0", "does not exist"),
        (["mesh", "tp"], -1, "mesh.tp"),
        (["schedule", "micro_batches"], 0, "micro_batches"),
        (["costs", 0, "chunks", 0, "forward", "overhead_seconds"], 1e308, "overhead_seconds"),
        (["costs", 0, "chunks", 0, "forward", "compute_seconds"], -1, "compute_seconds"),
    ],
)
def test_a_plan_edited_wrongly(capsys, tmp_path, path, value, message):
    assert message in refused(capsys, "simulate", edited(PLAN, tmp_path, path, value))


@pytest.mark.parametrize(
    ("field", "value"), [("peak_bytes", []), ("capacity_bytes", []), ("step_seconds", 0), ("seconds_by_part", {})]
)
def test_a_plan_without_its_prediction_cannot_be_explained(capsys, tmp_path, field, value):
    assert field in refused(capsys, "explain", edited(PLAN, tmp_path, ["predicted", field], value))


@pytest.mark.parametrize("text", ["", "{", "null", '{"format": ' + "9" * 5000 + "}", "[" * 100_000])
def test_a_plan_cut_off(capsys, tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    refused(capsys, "simulate", tmp_path / "bad.json")


def edited(source, tmp_path, path, value):
    """A copy of a document with one field changed."""
    data = json.loads(source.read_text())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(data))
    return tmp_path / "bad.json"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fix", "virtual_stages=99,pp=2"], "99"),
        (["--fix", "tp =1,tp=2"], "both 1 and 2"),
        (["--fix", "=2"], "key=value"),
        (["--fix", "sp=1,tp=1"], "sp=1 divides the sequence over tp"),
        (["--fix", "zero=2", "--forbid", "zero"], "zero is both forbidden and fixed to 2"),
        (["--forbid", "dp,pp,tp"], "no dp, no pp, no tp"),
        (["--time-limit", "nan"], "time limit"),
        (["--seq-len", str(10**30)], "at most"),
        (["--global-batch", str(10**9 - 63)], "between 1 and 1,000,000"),
        (["--global-batch", str(10**15)], "at most"),
    ],
)
def test_a_request_that_cannot_be(capsys, tmp_path, words, message):
    assert message in refused(capsys, *plan_words(tmp_path, *words))


@pytest.mark.parametrize("place", ["absent/p.json", ".", "x" * 300])
def test_a_place_that_cannot_be_written_is_named_before_the_work(capsys, tmp_path, place):
    assert "cannot be written" in refused(capsys, *plan_words(tmp_path, "-o", tmp_path / place, model="absent.py"))


@pytest.mark.parametrize("option", ["--trace", "--picture", "--timeline"])
def test_simulate_writes_nothing_where_one_place_is_missing(capsys, tmp_path, option):
    trace = ["--trace", tmp_path / "t.json"] if option != "--trace" else []
    assert "no folder" in refused(capsys, "simulate", PLAN, *trace, option, tmp_path / "absent" / "x.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_of_unknown_kind_leaves_no_trace_file(capsys, tmp_path):
    refused(capsys, "simulate", PLAN, "--trace", tmp_path / "t.json", "--picture", tmp_path / "p.gif")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_older_file(tmp_path):
    target = tmp_path / "plan.json"
    target.write_text("older")

    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    command = [sys.executable, "-m", "autopar", *map(str, plan_words(tmp_path, "-o", target))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=small, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert target.read_text() == "older"


def test_a_full_standard_output_is_one_message():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "autopar", "profiles"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "autopar: the output: No space left on device\n")


def test_a_device_is_written_to_and_stays_a_device():
    write_atomically("/dev/null", "text")
    assert not Path("/dev/null").is_file()


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "autopar.documents.base.os.umask", lambda _: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(DocumentError, match="No space left"):
        write_atomically(tmp_path / "x.json", "text")
    assert not list(tmp_path.iterdir())

"""What cannot be captured says where and what to do; what is far too large for the machine is captured all the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.errors import CaptureError
from autopar.tracer import capture

ROOT = Path(__file__).parents[3]
MODEL = """
import torch
from torch import nn

@torch.library.custom_op("tests_of_limits::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)
    def forward(self, x):
        y = self.mix(x)
        return {expression}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

SEQ_LEN = 16
def build_model(): return Model()
def example_inputs(batch, seq): return (torch.zeros(batch, seq, 8, dtype=torch.get_default_dtype()),)
"""


@pytest.mark.parametrize(
    ("expression", "operator", "way_out"),
    [
        ("twice(y)", "tests_of_limits.twice", "torch.library.register_fake"),
        ("y[y > 0]", "aten.index", "a mask that selects"),
        ("y * torch.nonzero(y).sum()", "aten.nonzero", "a mask that selects"),
        ("y + torch.from_numpy(y.detach().float().numpy())", "aten.", ".numpy()"),
        ("y * y.sum().tolist()", "aten.", ".item()"),
    ],
)
def test_what_needs_values_names_module_operator_line_and_way_out(tmp_path, expression, operator, way_out):
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("{expression}", expression))
    with pytest.raises(CaptureError) as refused:
        capture(str(path))
    message = str(refused.value)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.endswith(f"return {expression}"))
    for part in ("module 'blocks.0' (Block)", f"operator {operator}", f"{path}:{line}", expression, way_out):
        assert part in message


HUGE = """
import resource, torch
from torch import nn
from autopar.tracer import capture

WIDE, LAYERS = 44_800, 100
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDE, WIDE)
        nn.init.xavier_normal_(self.mix.weight)
        self.scale = nn.Parameter(torch.ones(WIDE))
        self.register_buffer("table", torch.tril(torch.ones(WIDE, WIDE)))
    def forward(self, x): return self.mix(x) * self.scale

def resident(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = resident()
graph = capture(
    lambda: nn.Sequential(*(Block() for _ in range(LAYERS))),
    lambda batch, seq: (torch.zeros(batch, seq, WIDE, dtype=torch.get_default_dtype()),),
    seq_len=16,
)
print(graph.model.parameters, resident() - before)
"""


def test_a_model_of_800_gb_is_built_in_less_than_one():
    found = subprocess.run(
        [sys.executable, "-c", HUGE], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    parameters, grown = map(int, found.stdout.split())
    assert 4 * parameters > 800e9
    assert grown < 1 << 30

"""The pages of built-in profiles, and the schema that editors check cluster files by."""

import json
import subprocess
import sys

import jsonschema
import pytest
import yaml

from hardware_profiles.cluster import Cluster
from hardware_profiles.describe import describe_all, describe_one
from hardware_profiles.errors import ProfileError
from hardware_profiles.profile import HERE, chip_names, cluster_names


def test_the_list_has_one_line_for_each_built_in():
    first_words = [line.split()[0] for line in describe_all().splitlines() if line.strip()]
    assert all(first_words.count(name) == 1 for name in [*cluster_names(), *chip_names()])


@pytest.mark.parametrize("name", ["a100x64", "a100x64.yaml", "h100x16384", "v100x8", "local-cpu-x2", "mi300x", "b200"])
def test_every_figure_on_a_page_leads_to_a_source_on_it(name):
    for page in describe_one(name).split("\n\n"):
        title, *lines = page.splitlines()
        rows = [line for line in lines if not line.startswith("  [")]
        sources = {line.split()[0] for line in lines if line.startswith("  [")}
        assert title and rows
        assert {row.rsplit(maxsplit=1)[1] for row in rows} == sources


def test_a_page_shows_the_figures_of_the_file():
    page = describe_one("h100x64")
    for field, figure in [("nics.gigabits_per_second", "400"), ("intra.gigabytes_per_second", "450"),
                          ("teraflops.bf16", "989.4"), ("memory_gigabytes_per_second", "3350")]:  # fmt: skip
        assert any(field in line and figure in line.split() for line in page.splitlines()), field


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ProfileError, match="did you mean 'h200x8'"):
        describe_one("h200x")


@pytest.mark.parametrize("name", cluster_names())
def test_the_schema_takes_cluster_files_as_they_are_written(name):
    data = yaml.safe_load((HERE / "clusters" / f"{name}.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(data, json.loads(json.dumps(Cluster.model_json_schema())))


def test_the_schema_takes_what_the_loader_fills_in_from_the_chip():
    data = yaml.safe_load((HERE / "clusters" / "a100x8.yaml").read_text(encoding="utf-8"))
    for intra in ({"latency_us": 1.0}, None):
        data["node_groups"][0].pop("intra", None)
        data["node_groups"][0] |= {"intra": intra} if intra else {}
        jsonschema.validate(data, Cluster.model_json_schema())


def test_reading_a_profile_imports_neither_networkx_nor_numpy():
    code = "import sys, hardware_profiles.profile as p; p.load_cluster('a100x64'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hardware_profiles.cluster" in loaded
    assert not {"networkx", "numpy", "torch"} & set(loaded)


def test_the_schema_refuses_another_format_and_an_unknown_field():
    data = yaml.safe_load((HERE / "clusters" / "a100x8.yaml").read_text(encoding="utf-8"))
    for wrong in ({**data, "format": "autopar-cluster/2"}, {**data, "nodes": 8}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, Cluster.model_json_schema())

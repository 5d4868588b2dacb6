"""Built-in chips and clusters: all load, all say where their figures come from, and the figures are the published ones."""

import re

import pytest

from hardware_profiles.chip import GIB
from hardware_profiles.cluster import Cluster
from hardware_profiles.profile import chip_names, cluster_names, load_chip, load_cluster
from hardware_profiles.topology import Topology

NOT_IN_A_DATASHEET = {"memory_gib", "launch_us", "host_us", "context_gib", "communicator_gib"}


@pytest.mark.parametrize("name", chip_names())
def test_every_chip_loads_under_its_name_and_says_where_its_figures_come_from(name):
    chip = load_chip(name)
    assert chip.name == name and chip.source
    assert set(chip.sources) >= NOT_IN_A_DATASHEET
    assert set(chip.sources) <= set(type(chip).model_fields)


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_loads_under_its_name_and_says_where_its_figures_come_from(name):
    cluster = load_cluster(f"{name}.yaml")
    assert cluster.name == name and cluster.source
    assert "intra.latency_us" in cluster.sources and "host" in cluster.sources
    assert ("price" in cluster.sources) == (cluster.price is not None)


@pytest.mark.parametrize("name", [name for name in cluster_names() if re.search(r"x\d+$", name)])
def test_a_cluster_named_for_its_devices_has_as_many(name):
    assert load_cluster(name).devices == int(name.rpartition("x")[2])


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops", "gigabytes_per_second", "link"),
    [
        # NVIDIA, AMD datasheets: dense peak, memory bandwidth, interconnect both directions together
        ("v100-32gb-sxm", "fp16", 125, 900, 300),
        ("t4", "fp16", 65, 320, 31.5),
        ("a100-80gb-sxm", "bf16", 312, 2039, 600),
        ("a100-40gb-sxm", "bf16", 312, 1555, 600),
        ("a800-80gb-sxm", "bf16", 312, 2039, 400),
        ("h100-80gb-sxm", "bf16", 989.4, 3350, 900),
        ("h800-80gb-sxm", "bf16", 989.4, 3350, 400),
        ("h100-80gb-pcie", "fp8", 1513, 2000, 126),
        ("h200", "bf16", 989.4, 4800, 900),
        ("h20", "bf16", 148, 4000, 900),
        ("b200", "bf16", 2250, 8000, 1800),
        ("gb200", "nvfp4", 10000, 8000, 1800),
        ("l40s", "bf16", 362, 864, 63),
        ("rtx4090", "bf16", 165.2, 1008, 63),
        ("mi300x", "bf16", 1307.4, 5300, 896),
    ],
)
def test_a_chip_has_the_figures_of_its_datasheet(name, dtype, teraflops, gigabytes_per_second, link):
    chip = load_chip(name)
    assert chip.peak_flops(dtype) == teraflops * 1e12
    assert chip.memory_bytes_per_second == gigabytes_per_second * 1e9
    assert chip.link.gigabytes_per_second * 2 == pytest.approx(link)


@pytest.mark.parametrize("name", [name for name in chip_names() if re.search(r"\d+gb", name)])
def test_memory_is_what_programs_find_of_the_gigabytes_on_the_label(name):
    label = int(re.search(r"(\d+)gb", name).group(1))
    assert 0.95 * label * GIB < load_chip(name).memory_bytes <= label * GIB


def test_gibibytes_and_gigabytes_are_not_mixed():
    """80 GiB and 2,039 GB/s: a whole read takes 42 ms; with one unit for both it would be 39 or 45 (2**30 = 1.074e9)."""
    chip = load_chip("a100-80gb-sxm").model_copy(update={"memory_gib": 80.0})
    assert chip.memory_bytes / chip.memory_bytes_per_second == pytest.approx(80 * 1.073741824 / 2039)
    assert chip.launch_seconds == 3e-6


def test_a_dgx_a100_has_300_gigabytes_per_second_each_way_inside_and_25_for_each_gpu_outside():
    """NVIDIA DGX A100 datasheet: 600 GB/s NVLink both ways, 8 x 200 Gb/s."""
    group = Topology(load_cluster("a100x64")).strided(16, 1)
    assert group.intra_bytes_per_second == 300e9
    assert group.inter_bytes_per_second == 25e9


def test_a_dgx_h100_has_450_gigabytes_per_second_each_way_inside_and_50_for_each_gpu_outside():
    """NVIDIA DGX H100 datasheet: 900 GB/s NVLink both ways, 8 x 400 Gb/s."""
    group = Topology(load_cluster("h100x64")).strided(16, 1)
    assert (group.intra_bytes_per_second, group.inter_bytes_per_second) == (450e9, 50e9)


def test_llama3_sees_an_interruption_every_three_hours():
    """Grattafiori et al., arXiv 2407.21783: 419 unexpected interruptions in 54 days on 16,384 GPUs."""
    cluster = load_cluster("h100x16384")
    assert cluster.failures.mtbf_hours_per_device / cluster.devices == pytest.approx(54 * 24 / 419, rel=0.01)


def test_a_name_works_from_any_folder_even_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "a100x64").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_cluster("a100x64") == load_cluster("a100x64.yaml") == Cluster.load("a100x64")


def test_the_hash_follows_every_figure():
    cluster = load_cluster("a100x64")
    group = cluster.node_groups[0]
    slower = group.model_copy(update={"chip": group.chip.model_copy(update={"launch_us": 4.0})})
    assert cluster.hash == load_cluster("a100x64").hash
    assert cluster.hash != cluster.model_copy(update={"node_groups": (slower,)}).hash


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("a100-80gb-sxm", "fp8", 312),  # not its int8 rate: fp8 values are cast to bf16
        ("a100-80gb-sxm", "float32", 19.5),  # not tf32, which rounds
        ("t4", "bfloat16", 8.1),  # tensor cores of Turing and Volta take fp16 only
        ("v100-32gb-sxm", "fp8", 125),
        ("h200", "nvfp4", 1978.9),
    ],
)
def test_a_dtype_that_a_chip_lacks_runs_as_one_that_holds_its_values(name, dtype, teraflops):
    assert load_chip(name).peak_flops(dtype) == teraflops * 1e12

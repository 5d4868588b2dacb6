"""Files that people really write wrong: each ends in one ProfileError that says what to do."""

import copy
import textwrap

import pytest
import yaml

from hardware_profiles.errors import ProfileError
from hardware_profiles.profile import chip_names, cluster_names, load_chip, load_cluster

GOOD = yaml.safe_load("""
format: autopar-cluster/1
name: mine
source: measured here
node_groups:
  - name: a
    nodes: 2
    chip: a100-80gb-sxm
    devices_per_node: 4
    intra: {kind: nvswitch, gigabytes_per_second: 300}
    nics: {count: 4, gigabits_per_second: 200, kind: infiniband}
    host: {memory_gib: 512, cores: 64, to_device_gigabytes_per_second: 25}
fabric: {kind: flat}
""")


def changed(path: str, value: object) -> dict:
    """The good cluster with one field set, or taken away (...)."""
    data = copy.deepcopy(GOOD)
    *inner, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = data
    for part in inner:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return data


@pytest.fixture
def refusal(tmp_path):
    """The message that a file's text ends in."""

    def say(text: str | bytes) -> str:
        path = tmp_path / "mine.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ProfileError) as caught:
            load_cluster(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    return say


def test_the_good_one_loads(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(yaml.safe_dump(GOOD))
    assert load_cluster(str(path)).devices == 8


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("format", "autopar-cluster/9", ["format", "'autopar-cluster/9'", "autopar-cluster/1"]),
        ("format", ..., ["format: missing", "autopar-cluster/1"]),
        ("name", ..., ["name: missing"]),
        ("source", ..., ["source: missing"]),
        ("node_groups", [], ["node_groups", "at least 1"]),
        ("node_groups", "a100", ["node_groups", "'a100'"]),
        ("node_group", [], ["node_group: unknown field", "did you mean 'node_groups'?", "allowed:"]),
        ("node_groups.0.nodes", 0, ["node_groups.0.nodes", "greater than or equal to 1", "given 0"]),
        ("node_groups.0.nodes", True, ["node_groups.0.nodes", "not true or false"]),
        ("node_groups.0.nodes", "eight", ["node_groups.0.nodes", "valid integer", "'eight'"]),
        ("node_groups.0.nodes", 1.5, ["node_groups.0.nodes", "integer", "1.5"]),
        ("node_groups.0.nodez", 2, ["did you mean 'nodes'?"]),
        ("node_groups.0.spare", 2, ["node_groups.0.spare", "2 of 2 nodes"]),
        ("node_groups.0.nics", ..., ["node_groups.0.nics", "2 nodes"]),
        ("node_groups.0.nics.kind", "infinband", ["did you mean 'infiniband'?", "'roce'"]),
        ("node_groups.0.nics.gigabits_per_second", -200, ["gigabits_per_second", "greater than 0", "-200"]),
        ("node_groups.0.intra.gigabytes_per_second", float("inf"), ["gigabytes_per_second", "finite"]),
        ("node_groups.0.intra.gigabytes_per_second", float("nan"), ["gigabytes_per_second", "finite"]),
        ("node_groups.0.intra.bandwidth", 300, ["intra.bandwidth: unknown field", "gigabytes_per_second"]),
        ("node_groups.0.intra.kind", "nvlink_mesh", ["intra.links: missing"]),
        ("node_groups.0.intra.switch_groups", [[0, 1]], ["switch_groups", "for pcie"]),
        ("node_groups.0.usable_memory_gib", 100, ["usable_memory_gib: 100", "79.15", "a100-80gb-sxm"]),
        ("node_groups.0.host", ..., ["node_groups.0.host: missing"]),
        ("node_groups.0.chip", ..., ["node_groups.0.chip: missing"]),
        ("node_groups.0.chip", 100, ["node_groups.0.chip", "name", "given 100"]),
        ("node_groups.0.chip", "a100-80gb-sxn", ["did you mean 'a100-80gb-sxm'?"]),
        ("node_groups.0.chip", "a100x64", ["which is a cluster"]),
        ("node_groups.0.chip", "chips/none.yaml", ["node_groups.0.chip", "none.yaml: no such file"]),
        ("node_groups.0.chip", {"name": "x"}, ["node_groups.0.chip.memory_gib: missing"]),
        ("fabric.kind", "single_node", ["single_node", "2 nodes"]),
        ("fabric.kind", "fat_tree", ["fabric.nodes_per_leaf: missing"]),
        ("fabric.kind", "nvlink_domain", ["fabric.nodes_per_domain: missing"]),
        ("fabric.nodes_per_domain", 2, ["fabric.nodes_per_domain", "flat"]),
        ("fabric.leaf_oversubscription", 0.5, ["leaf_oversubscription", "greater than or equal to 1"]),
        ("price", {"per_device_hour": -1}, ["price.per_device_hour", "-1"]),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(refusal, path, value, said):
    message = refusal(yaml.safe_dump(changed(path, value)))
    assert [part for part in said if part not in message] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", "is a list, expected a mapping"),
        (b"hello", "is a str, expected a mapping"),
        (b"a: [1, 2\nb: 3\n", "line 2, column 2"),
        (b"a: 1\n\tb: 2\n", "line 2, column 1"),
        (b"name: x\nname: y\n", "line 2, column 1: not valid YAML: 'name' is given twice"),
        (b"a: {b: 1, b: 2}\n", "'b' is given twice"),
        (b"? [1, 2]\n: 3\n", "a key must be plain text"),
        (b"a: *nowhere\n", "line 1, column 4"),
        (b"a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        (b"---\na: 1\n---\nb: 2\n", "not valid YAML: expected a single document"),
        (b"\x7fELF\x02\x01\x00\xff\xfe", "not text in UTF-8"),
        ("name: é\n".encode("utf-16"), "not text in UTF-8"),
        (b"a: \x00\n", "not valid YAML"),
        (b"a: &a [*a]\nformat: autopar-cluster/1\n", "recursive"),
    ],
)
def test_text_that_is_no_cluster_says_where(refusal, text, said):
    assert said in refusal(text)


def test_a_list_that_doubles_itself_is_refused_at_once(refusal):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    assert "unknown field" in refusal("format: autopar-cluster/1\n" + "\n".join(lines))


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([[0, 1], [1, 0]], "4 rows of 4"),
        ([[0, 1, 0, 1], [1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]], "4 rows of 4"),
        ([[0, 2, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], "0 to 1 is 2 and 1 to 0 is 1"),
        ([[0, -1, 0, 1], [-1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], "no negative"),
        ([[1, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], "device 0 is linked to itself"),
    ],
)
def test_a_matrix_of_links_is_square_symmetric_and_not_negative(refusal, links, said):
    intra = {"kind": "nvlink_mesh", "gigabytes_per_second": 25, "links": links}
    assert said in refusal(yaml.safe_dump(changed("node_groups.0.intra", intra)))


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3, 4]], []])
def test_switch_groups_name_every_device_once(refusal, groups):
    intra = {"kind": "pcie", "gigabytes_per_second": 24, "switch_groups": groups}
    assert "each of devices 0 to 3 once" in refusal(yaml.safe_dump(changed("node_groups.0.intra", intra)))


def test_devices_that_share_the_hosts_memory_do_not_take_more_than_there_is(refusal):
    data = changed("node_groups.0.intra", {"kind": "shared_memory", "gigabytes_per_second": 2})
    assert "4 devices * 79.15 GiB = 316.6 GiB" in refusal(yaml.safe_dump(changed_host(data, 256)))


def changed_host(data: dict, memory_gib: float) -> dict:
    data["node_groups"][0]["host"]["memory_gib"] = memory_gib
    return data


def test_all_mistakes_are_told_at_once(refusal):
    data = changed("node_groups.0.nodes", -1)
    data["fabric"]["kind"] = "ring"
    message = refusal(yaml.safe_dump(data))
    assert "node_groups.0.nodes" in message and "fabric.kind" in message


@pytest.mark.parametrize("load", [load_cluster, load_chip])
@pytest.mark.parametrize("name", ["", "nothing", "x" * 5000, "a\0b", "no/such/file.yaml", "."])
def test_a_name_that_leads_nowhere_is_refused(load, name):
    with pytest.raises(ProfileError):
        load(name)


def test_an_unknown_name_gets_the_nearest_and_all_the_others():
    with pytest.raises(ProfileError, match="did you mean 'a100x64'") as caught:
        load_cluster("a100x46.yaml")
    assert all(name in str(caught.value) for name in cluster_names())


def test_a_chip_given_for_a_cluster_is_told_apart():
    with pytest.raises(ProfileError, match="is a chip"):
        load_cluster("h200")


def test_a_folder_is_no_cluster(tmp_path):
    with pytest.raises(ProfileError, match="is a folder"):
        load_cluster(tmp_path)


CHIP = textwrap.dedent("""
    name: tiny
    vendor: me
    source: measured
    memory_gib: 4
    memory_gigabytes_per_second: 1e2
    teraflops: {fp32: 1}
    link: {kind: pcie, gigabytes_per_second: 8}
    efficiency: ampere
    overlap_slowdown: {gemm: 3}
    """)


def test_a_chip_file_is_found_from_the_cluster_files_folder_and_its_own_sections_win(tmp_path, monkeypatch):
    (tmp_path / "chips").mkdir()
    (tmp_path / "chips" / "tiny.yaml").write_text(CHIP)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(changed("node_groups.0.chip", "chips/tiny.yaml")))
    monkeypatch.chdir("/")
    chip = load_cluster(tmp_path / "mine.yaml").node_groups[0].chip
    assert chip.memory_bytes_per_second == 100e9
    assert chip.efficiency == load_chip("a100-80gb-sxm").efficiency
    assert chip.overlap_slowdown.gemm == 3


def test_a_chip_may_stand_in_the_cluster_file_itself(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(changed("node_groups.0.chip", yaml.safe_load(CHIP))))
    assert load_cluster(path).node_groups[0].chip.name == "tiny"


def test_a_node_is_linked_as_its_chip_is_unless_the_file_says_otherwise(tmp_path):
    def intra(value):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(changed("node_groups.0.intra", value)))
        found = load_cluster(path).node_groups[0].intra
        return found.kind, found.gigabytes_per_second, found.latency_us

    assert intra(...) == ("nvswitch", 300, 2.5)
    assert intra({"latency_us": 1}) == ("nvswitch", 300, 1)
    assert intra({"gigabytes_per_second": 100}) == ("nvswitch", 100, 2.5)
    with pytest.raises(ProfileError, match="gigabytes_per_second: missing"):
        intra({"kind": "pcie"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("efficiency: amper", "did you mean 'ampere'?"),
        ("teraflops: {bf17: 3}", "bf17"),
        ("teraflops: {}", "at least one dtype"),
        ("teraflops: {bf16: true}", "not true or false"),
        ("teraflops: {bf16: -3}", "above 0"),
        ("memory_gb: 80", "did you mean 'memory_gib'?"),
        ("host_us: -1", "host_us"),
    ],
)
def test_a_wrong_chip_is_refused(tmp_path, line, said):
    path = tmp_path / "tiny.yaml"
    kept = [old for old in CHIP.strip().splitlines() if not old.startswith(line.partition(":")[0] + ":")]
    path.write_text("\n".join([*kept, line]))
    with pytest.raises(ProfileError) as caught:
        load_chip(path)
    assert said in str(caught.value)


def test_anchors_and_merges_are_read_as_yaml_means_them(tmp_path):
    path = tmp_path / "mine.yaml"
    merged = "nics: {<<: &net {count: 4, gigabits_per_second: 100, kind: roce}, count: 2}"
    path.write_text(
        "format: autopar-cluster/1\nname: a\nsource: b\nfabric: {kind: flat}\nnode_groups:\n"
        "  - {name: a, nodes: 2, chip: t4, devices_per_node: 4, intra: {kind: pcie, gigabytes_per_second: 12},\n"
        f"     {merged},\n     host: {{memory_gib: 64, cores: 8, to_device_gigabytes_per_second: 12}}}}\n"
    )
    nics = load_cluster(path).node_groups[0].nics
    assert (nics.count, nics.gigabits_per_second, nics.kind) == (2, 100, "roce")


def test_only_the_files_that_a_name_leads_to_are_read(monkeypatch):
    from hardware_profiles import profile

    read = []
    original = profile.read_mapping
    monkeypatch.setattr(profile, "read_mapping", lambda path: read.append(path.stem) or original(path))
    profile._tables.cache_clear()
    load_cluster("t4x4")
    assert read == ["t4x4", "t4", "turing"]
    assert len(chip_names()) > len(read)

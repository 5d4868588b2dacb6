"""Small chips and groups that stand on their own: no profile file, no tables."""

from hardware_profiles.chip import Chip, ChipLink
from hardware_profiles.cluster import Group


def chip(**changes):
    fields = {
        "name": "test-chip",
        "vendor": "none",
        "source": "made up for tests",
        "memory_gib": 80,
        "memory_gigabytes_per_second": 2000,
        "teraflops": {"bf16": 300, "fp8": 600, "fp32": 20},
        "link": ChipLink(kind="nvlink", gigabytes_per_second=300),
    }
    return Chip(**{**fields, **changes})


def node_group(size=8, bandwidth=300e9, **changes):
    fields = {
        "size": size,
        "ranks_per_node": size,
        "intra_kind": "nvswitch",
        "intra_bytes_per_second": bandwidth,
        "intra_latency_seconds": 2.5e-6,
    }
    return Group(**{**fields, **changes})


def spread_group(nodes, ranks_per_node=8, nic=25e9, bandwidth=300e9, **changes):
    fields = {
        "size": nodes * ranks_per_node,
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "intra_kind": "nvswitch",
        "intra_bytes_per_second": bandwidth,
        "intra_latency_seconds": 2.5e-6,
        "inter_kind": "infiniband",
        "inter_bytes_per_second": nic,
        "inter_latency_seconds": 5e-6,
    }
    return Group(**{**fields, **changes})

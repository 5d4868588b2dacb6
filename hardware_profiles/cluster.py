"""A cluster: node groups, fabric, storage, price; and what a group of ranks sees of it.

Devices are numbered node by node in listed order. `Topology` (a networkx graph) answers for any set of devices; `Group`
is the answer in the form that cost models price.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from hardware_profiles.chip import GIB, Chip
from hardware_profiles.chip import Curve as Curve
from hardware_profiles.schema import Facts, OrText, Schema

LINKED_AS = {"nvlink": "nvswitch", "xgmi": "xgmi", "pcie": "pcie", "none": "shared_memory"}
"""How a node's devices are linked that have such ports, unless its file says otherwise."""


class Intra(Facts):
    """Links between the devices of one node: per device, each direction."""

    # in a file nothing is required, for the chip's link fills in what is missing
    model_config = ConfigDict(json_schema_extra=lambda schema: schema.update(required=[]))

    kind: Literal["nvswitch", "nvlink_mesh", "xgmi", "pcie", "shared_memory"]
    gigabytes_per_second: float = Field(gt=0)
    """Per device, all its links together, each direction (where `links` are given: one link)."""
    latency_us: float = Field(default=2.5, ge=0)
    peer_to_peer: bool = True
    links: tuple[tuple[int, ...], ...] | None = None
    """nvlink_mesh, or an xgmi that is no full mesh: number of links between each pair of devices."""
    switch_groups: tuple[tuple[int, ...], ...] | None = None
    """pcie: devices below one switch; groups talk through the host bridge."""
    host_bridge_shared_by: int = Field(default=1, ge=1)
    """pcie: devices that share one path to the host, of the same bandwidth as a device's own."""


class Nics(Facts):
    """Network ports of one node."""

    count: int = Field(ge=1, le=1024)
    gigabits_per_second: float = Field(gt=0)
    """Each port, each direction."""
    kind: Literal["infiniband", "roce", "ethernet", "omnipath", "efa"]
    rail_aligned: bool = True
    """Port i of every node hangs on rail i, next to device i * devices / count."""
    latency_us: float = Field(default=5.0, ge=0)


class Host(Facts):
    """The node's CPU side."""

    memory_gib: float = Field(gt=0)
    cores: int = Field(ge=1)
    to_device_gigabytes_per_second: float = Field(gt=0)
    shared_by_devices: int = Field(default=1, ge=1)


def _from_the_chips_link(schema: dict[str, Any]) -> None:
    """In a file, what `intra` leaves out comes from the chip."""
    schema["required"].remove("intra")
    schema["properties"]["intra"]["description"] = "default: the chip's link"


class NodeGroup(Facts):
    """Equal nodes."""

    model_config = ConfigDict(json_schema_extra=_from_the_chips_link)

    name: str
    nodes: int = Field(ge=1, le=1_000_000)
    spare: int = Field(default=0, ge=0)
    """Of these, kept out of the plan."""
    chip: Annotated[Chip, OrText("name of a built-in chip, or path of a chip file, from the cluster file's folder")]
    devices_per_node: int = Field(ge=1, le=1024)
    usable_memory_gib: float | None = Field(default=None, gt=0)
    """Default: the chip's memory; less where a display or another tenant takes some."""
    intra: Intra
    """Overrides the chip's link, which says kind and bandwidth where this does not."""
    nics: Nics | None = None
    host: Host

    @model_validator(mode="before")
    @classmethod
    def _linked_as_the_chip_is(cls, data: Any) -> Any:
        chip = data.get("chip") if isinstance(data, dict) else None
        intra = data.get("intra", {}) if isinstance(data, dict) else None
        if not isinstance(chip, Chip) or not isinstance(intra, dict) or chip.link.kind not in LINKED_AS:
            return data
        link = {"kind": LINKED_AS[chip.link.kind], "gigabytes_per_second": chip.link.gigabytes_per_second}
        return {**data, "intra": link | intra if intra.get("kind", link["kind"]) == link["kind"] else intra}

    @property
    def devices(self) -> int:
        """Devices that a plan may use."""
        return (self.nodes - self.spare) * self.devices_per_node

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes of one device that a plan may use."""
        return (self.usable_memory_gib or self.chip.memory_gib) * GIB


class Fabric(Facts):
    """The network between nodes."""

    kind: Literal["single_node", "flat", "fat_tree", "rail_optimized", "nvlink_domain"]
    nodes_per_leaf: int | None = Field(default=None, ge=1)
    leaf_oversubscription: float = Field(default=1.0, ge=1)
    spine_oversubscription: float = Field(default=1.0, ge=1)
    hop_latency_us: float = Field(default=1.0, ge=0)
    in_network_reduction: bool = False
    nodes_per_domain: int | None = Field(default=None, ge=1)
    """nvlink_domain: nodes that share one NVLink switch (NVL72: 18 nodes of 4)."""


class Storage(Facts):
    """Shared storage of the cluster."""

    gigabytes_per_second: float = Field(gt=0)


class Price(Facts):
    """What devices and energy cost."""

    per_device_hour: float = Field(ge=0)
    currency: str = "USD"
    per_kwh: float = Field(default=0.0, ge=0)


class Failures(Facts):
    """How often devices fail."""

    mtbf_hours_per_device: float = Field(gt=0)


class Cluster(Facts):
    """A cluster profile, chips inlined."""

    format: Literal["autopar-cluster/1"] = "autopar-cluster/1"
    name: str
    source: str
    """Where the figures come from; `sources` may add one per field."""
    sources: dict[str, str] = {}
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1)
    fabric: Fabric
    storage: Storage | None = None
    price: Price | None = None
    failures: Failures | None = None
    curves: tuple[Curve, ...] = ()

    @property
    def devices(self) -> int:
        """Devices that a plan may use, all groups together."""
        return sum(group.devices for group in self.node_groups)

    @classmethod
    def load(cls, name: str) -> Cluster:
        """A cluster by its built-in name or YAML file; raises ProfileError."""
        from hardware_profiles.profile import load_cluster

        return load_cluster(name)

    @property
    def hash(self) -> str:
        """A short digest of every figure."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class Group(Schema):
    """What a collective over some devices sees: the figures that `cost_models.collectives` prices.

    Bandwidths are per device, each direction, when all groups of the same shape (all replicas of the axis) run at once,
    so shared NICs and oversubscribed spines are already divided.
    """

    size: int
    nodes: int = 1
    ranks_per_node: int = 1
    """The most on one node; size <= nodes * ranks_per_node. Nodes that share one NVLink switch count as one."""
    intra_kind: Literal["nvswitch", "nvlink_mesh", "xgmi", "pcie", "shared_memory", "none"] = "none"
    intra_bytes_per_second: float = 0.0
    intra_latency_seconds: float = 0.0
    peer_to_peer: bool = True
    """False: through host memory, which the cost models price (`cost_models.nccl`); not part of the bandwidth above."""
    inter_kind: Literal["infiniband", "roce", "ethernet", "omnipath", "efa", "none"] = "none"
    inter_bytes_per_second: float = 0.0
    """ranks_per_node times this leaves the narrowest of the nodes."""
    inter_latency_seconds: float = 0.0
    in_network_reduction: bool = False
    chip: str = ""
    curves: tuple[Curve, ...] = ()
    """Measured curves of this cluster for this shape of group, if any."""

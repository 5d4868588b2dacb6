"""YAML to Cluster and Chip: built-in names with or without ``.yaml``, or a path; errors name file, field and what is allowed."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Cluster
from hardware_profiles.errors import ProfileError
from hardware_profiles.schema import Schema, did_you_mean, readable

HERE = Path(__file__).parent
Document = TypeVar("Document", bound=Schema)


def cluster_names() -> list[str]:
    """Built-in clusters."""
    return _names("clusters")


def chip_names() -> list[str]:
    """Built-in chips."""
    return _names("chips")


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by its built-in name (with or without ``.yaml``) or file. Raises ProfileError."""
    return cluster_from_yaml(_place(str(name), "clusters", "cluster"))


def load_chip(name: str | Path) -> Chip:
    """A chip by its built-in name or file. Raises ProfileError."""
    path = _place(str(name), "chips", "chip")
    return _validate(Chip, _with_tables(_read(path), path), path)


@cache
def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (HERE / folder).glob("*.yaml"))


def _place(name: str, folder: str, kind: str) -> Path:
    """A user's file goes before a built-in name, but only a path with a suffix can be a file."""
    path = Path(name)
    if path.is_dir():
        raise ProfileError(f"{name}: is a folder, expected a {kind} file (YAML) or a built-in name")
    if path.is_file():
        return path
    stem = path.name.removesuffix(".yaml").removesuffix(".yml")
    if stem in _names(folder) and len(path.parts) == 1:
        return HERE / folder / f"{stem}.yaml"
    if len(path.parts) > 1:
        raise ProfileError(f"{name}: no such file")
    known = _names(folder)
    raise ProfileError(
        f"no {kind} named '{stem}'{did_you_mean(stem, known)}; built-in: {', '.join(known)}; or give the path of a YAML file"
    )


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice."""


def _unique_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"'{key}' is given twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read as YAML text: {error}") from None
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ProfileError(f"{path}{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ProfileError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        given = "empty" if data is None else f"a {type(data).__name__}"
        raise ProfileError(f"{path}: is {given}, expected a mapping of fields such as name, source, ...")
    return data


def _validate(model: type[Document], data: dict[str, Any], path: Path) -> Document:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"{path}: {readable(error, model)}") from None


def cluster_from_yaml(path: Path) -> Cluster:
    """The cluster in a file, its chips read in. Raises ProfileError."""
    data = _read(path)
    if data.get("format") != "autopar-cluster/1":
        given = data.get("format")
        raise ProfileError(f"{path}: format is {given!r}, expected 'autopar-cluster/1' as the file's first line")
    groups = data.get("node_groups")
    if isinstance(groups, list):
        data = {**data, "node_groups": [_with_chip(group, path, number) for number, group in enumerate(groups)]}
    cluster = _validate(Cluster, data, path)
    _check(cluster, path)
    return cluster


def _with_chip(group: Any, path: Path, number: int) -> Any:
    """A node group with its chip's name or path replaced by the chip."""
    if not isinstance(group, dict) or "chip" not in group:
        return group
    chip = group["chip"]
    if isinstance(chip, str):
        local = path.parent / chip
        try:
            chip = load_chip(local if len(Path(chip).suffix) > 1 and local.is_file() else chip)
        except ProfileError as error:
            raise ProfileError(f"{path}: node_groups.{number}.chip: {error}") from None
    elif isinstance(chip, dict):
        chip = _with_tables(chip, path)
    return {**group, "chip": chip}


@cache
def _tables(name: str) -> dict[str, Any]:
    return _read(HERE / "efficiency" / f"{name}.yaml")


def _with_tables(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """A chip whose `efficiency` names a shared file of measured tables; the chip's own sections win."""
    name = data.get("efficiency")
    if not isinstance(name, str):
        return data
    known = _names("efficiency")
    if name not in known:
        raise ProfileError(
            f"{path}: efficiency: no tables named '{name}'{did_you_mean(name, known)}; there are {', '.join(known)}"
        )
    return {**_tables(name), **{key: value for key, value in data.items() if key != "efficiency"}}


def _check(cluster: Cluster, path: Path) -> None:
    """What fields cannot say one by one."""
    problems = list(_problems(cluster))
    if problems:
        raise ProfileError(f"{path}: " + "\n".join(problems))


def _problems(cluster: Cluster) -> Any:
    nodes = sum(group.nodes for group in cluster.node_groups)
    for number, group in enumerate(cluster.node_groups):
        at = f"node_groups.{number}"
        if group.spare >= group.nodes:
            yield f"{at}.spare: {group.spare} of {group.nodes} nodes are spare, so none is left"
        if nodes > 1 and group.nics is None:
            yield f"{at}.nics: missing, but the cluster has {nodes} nodes: say how they reach each other"
        if group.usable_memory_gib is not None and group.usable_memory_gib > group.chip.memory_gib:
            yield f"{at}.usable_memory_gib: {group.usable_memory_gib} is more than the chip's {group.chip.memory_gib} GiB"
        yield from _mesh_problems(group.intra.links, group.devices_per_node, group.intra.kind, at)
        listed = sorted(device for part in group.intra.switch_groups or () for device in part)
        if listed and listed != list(range(group.devices_per_node)):
            yield f"{at}.intra.switch_groups: must name each of devices 0 to {group.devices_per_node - 1} once"
    if cluster.fabric.kind == "single_node" and nodes > 1:
        yield f"fabric.kind: single_node, but there are {nodes} nodes"
    if cluster.fabric.kind == "nvlink_domain" and cluster.fabric.nodes_per_domain is None:
        yield "fabric.nodes_per_domain: missing, but fabric.kind is nvlink_domain"
    if cluster.fabric.kind in ("fat_tree", "rail_optimized") and cluster.fabric.nodes_per_leaf is None:
        yield f"fabric.nodes_per_leaf: missing, but fabric.kind is {cluster.fabric.kind}"
    if not all(math.isfinite(group.intra.gigabytes_per_second) for group in cluster.node_groups):
        yield "node_groups: bandwidths must be finite"


def _mesh_problems(links: tuple[tuple[int, ...], ...] | None, devices: int, kind: str, at: str) -> Any:
    if kind != "nvlink_mesh":
        return
    if links is None:
        yield f"{at}.intra.links: missing, but intra.kind is nvlink_mesh"
    elif len(links) != devices or any(len(row) != devices for row in links):
        yield f"{at}.intra.links: must be {devices} rows of {devices} numbers"
    elif any(links[a][b] != links[b][a] or links[a][b] < 0 for a in range(devices) for b in range(devices)):
        yield f"{at}.intra.links: must be symmetric, with no negative numbers"

"""YAML to Cluster and Chip: built-in names with or without ``.yaml``, or a path; errors name file, field and what is allowed.

Only the files that a name leads to are read: the cluster, its chips, their measured tables.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from hardware_profiles.checks import contradictions
from hardware_profiles.chip import Chip
from hardware_profiles.cluster import Cluster
from hardware_profiles.errors import ProfileError
from hardware_profiles.schema import Schema, did_you_mean, readable
from hardware_profiles.yaml_text import read_mapping

HERE = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")
TABLES = ("efficiency", "overlap_slowdown", "residuals")
CLUSTER_FORMAT = "autopar-cluster/1"
Document = TypeVar("Document", bound=Schema)


def cluster_names() -> list[str]:
    """Built-in clusters."""
    return list(_names("clusters"))


def chip_names() -> list[str]:
    """Built-in chips."""
    return list(_names("chips"))


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by its built-in name (with or without ``.yaml``) or file. Raises ProfileError."""
    return cluster_from_yaml(_place(str(name), "clusters", "cluster"))


def to_yaml(cluster: Cluster) -> str:
    """A cluster as a file that `load_cluster` reads, its chips inlined."""
    said = {"format": cluster.format, **cluster.model_dump(mode="json", exclude_defaults=True)}
    return yaml.safe_dump(said, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def load_chip(name: str | Path) -> Chip:
    """A chip by its built-in name or file. Raises ProfileError."""
    path = _place(str(name), "chips", "chip")
    return _validate(Chip, _with_tables(read_mapping(path), path), path)


@cache
def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (HERE / folder).glob("*.yaml")))


def _place(name: str, folder: str, kind: str) -> Path:
    """A bare name is a built-in before it is anything in this folder; with a suffix a file here goes first."""
    path, known = Path(name), _names(folder)
    if name in known:
        return HERE / folder / f"{name}.yaml"
    if _is(path, "file"):
        return path
    stem = path.stem if path.suffix in SUFFIXES else path.name
    bare = len(path.parts) <= 1
    if bare and stem in known:
        return HERE / folder / f"{stem}.yaml"
    if _is(path, "folder"):
        raise ProfileError(f"{name}: is a folder, expected a {kind} file (YAML) or a built-in name")
    if not bare:
        raise ProfileError(f"{name}: no such file")
    raise ProfileError(
        f"no {kind} named '{stem}'{_other_kind(stem, kind) or did_you_mean(stem, known)}; "
        f"built-in: {', '.join(known)}; or give the path of a YAML file"
    )


def _is(path: Path, what: str) -> bool:
    try:
        return path.is_file() if what == "file" else path.is_dir()
    except (OSError, ValueError):  # too long, or with a zero byte: no path at all
        return False


def _other_kind(stem: str, kind: str) -> str:
    if kind == "cluster" and stem in _names("chips"):
        return ", which is a chip: a cluster file names it in a node group"
    if kind == "chip" and stem in _names("clusters"):
        return ", which is a cluster"
    return ""


def _validate(model: type[Document], data: dict[str, Any], path: Path) -> Document:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"{path}: {readable(error, model)}") from None


def cluster_from_yaml(path: Path) -> Cluster:
    """The cluster in a file, its chips read in. Raises ProfileError."""
    data = read_mapping(path)
    given = data.get("format")
    if given != CLUSTER_FORMAT:
        said = "missing" if given is None else f"{given!r}"
        raise ProfileError(f"{path}: format: {said}, expected `format: {CLUSTER_FORMAT}` as the file's first line")
    groups = data.get("node_groups")
    if isinstance(groups, list):
        data = {**data, "node_groups": [_with_chip(group, path, number) for number, group in enumerate(groups)]}
    cluster = _validate(Cluster, data, path)
    problems = contradictions(cluster)
    if problems:
        raise ProfileError(f"{path}: " + "\n".join(problems))
    return cluster


def _with_chip(group: Any, path: Path, number: int) -> Any:
    """A node group with its chip's name or path replaced by the chip."""
    if not isinstance(group, dict) or "chip" not in group:
        return group
    chip = group["chip"]
    if isinstance(chip, dict):
        return {**group, "chip": _inline_chip(chip, path, number)}
    if not isinstance(chip, str):
        at = f"{path}: node_groups.{number}.chip"
        raise ProfileError(f"{at}: must be a chip's name, the path of a chip file, or a mapping, given {chip!r}")
    try:
        return {**group, "chip": load_chip(_beside(chip, path))}
    except ProfileError as error:
        raise ProfileError(f"{path}: node_groups.{number}.chip: {error}") from None


def _inline_chip(chip: dict[str, Any], path: Path, number: int) -> Chip:
    """Read before its node group, whose links may come from it."""
    data = _with_tables(chip, path)
    try:
        return Chip.model_validate(data)
    except ValidationError as error:
        raise ProfileError(f"{path}: {readable(error, Chip, within=f'node_groups.{number}.chip')}") from None


def _beside(chip: str, path: Path) -> str | Path:
    """A path is meant from the cluster file's folder; a bare name without suffix is a built-in."""
    is_path = len(Path(chip).parts) > 1 or (chip.endswith(SUFFIXES) and _is(path.parent / chip, "file"))
    return path.parent / chip if is_path else chip


@cache
def _tables(name: str) -> dict[str, Any]:
    path = HERE / "efficiency" / f"{name}.yaml"
    tables = read_mapping(path)
    unknown = set(tables) - set(TABLES)
    if unknown:
        raise ProfileError(f"{path}: unknown fields {sorted(unknown)}; allowed: {', '.join(TABLES)}")
    return tables


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

"""A YAML file as a mapping: safe, no key twice, and every failure names file, line and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hardware_profiles.errors import ProfileError

MERGE = "tag:yaml.org,2002:merge"
# The C parser, where PyYAML was built with it, reads a chip with its tables in a tenth of the time.
_Loader: Any = type("_UniqueKeyLoader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})


def _unique_mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    """Builds a mapping whose keys are plain text; a key given twice is an error, `<<` is not a key."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == MERGE:
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"'{key}' is given twice", problem_mark=key_node.start_mark)
        seen.add(key)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def read_mapping(path: Path) -> dict[str, Any]:
    """The file's fields. Raises ProfileError for anything but one YAML mapping in UTF-8."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not text in UTF-8 (byte {error.start}), expected a YAML file") from None
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = ": ".join(part for part in (error.context, error.problem) if part)
        raise ProfileError(f"{path}{place}: not valid YAML: {reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ProfileError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        given = "empty" if data is None else f"a {type(data).__name__}"
        raise ProfileError(f"{path}: is {given}, expected a mapping of fields such as name, source, ...")
    return data

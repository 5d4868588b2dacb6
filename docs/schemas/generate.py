"""Writes the published JSON Schemas of documents and cluster files; ``--check`` only says whether they are current."""

import json
import sys
from pathlib import Path

from autopar.documents import Graph, Plan, Timeline
from hardware_profiles.cluster import Cluster

HERE = Path(__file__).parent
MODELS = {"cluster": Cluster, "graph": Graph, "plan": Plan, "timeline": Timeline}


def schema_text(name: str) -> str:
    """The JSON Schema of one document as it is published."""
    return json.dumps(MODELS[name].model_json_schema(), indent=1) + "\n"


def main() -> None:
    """Write or check every schema."""
    stale = [name for name in MODELS if not _is_current(name)]
    if "--check" in sys.argv[1:]:
        if stale:
            sys.exit(f"out of date: {', '.join(stale)}; run `make schemas`")
        return
    for name in stale:
        (HERE / f"{name}.schema.json").write_text(schema_text(name), encoding="utf-8")


def _is_current(name: str) -> bool:
    path = HERE / f"{name}.schema.json"
    return path.exists() and path.read_text(encoding="utf-8") == schema_text(name)


if __name__ == "__main__":
    main()

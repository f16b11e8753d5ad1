"""Results on disk: one JSON file a device and experiment, written after every point, so that a run can be resumed.

{"experiment": "table1", "size": "small", "device": "...",
 "environments": {"1f0c...": {...}},
 "points": {"AlexNet, 256px | B=16 | rows": {"environment": "1f0c...", "contenders": {"plain": {...}}, ...}}}
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"

Record = dict[str, Any]


class Results:
    """The points of one experiment on one device."""

    def __init__(self, path: Path, experiment: str, size: str, environment: Record):
        self.path = path
        self.environment = digest(environment)
        self.data: Record = load(path) or {"environments": {}, "points": {}}
        self.data |= {"experiment": experiment, "size": size, "device": environment["device"]}
        self.data["environments"][self.environment] = environment

    def measured(self, key: str, contenders: list[str], any_environment: bool = False) -> bool:
        """Whether the point is there with all these contenders, measured in this environment."""
        point = self.data["points"].get(key)
        if point is None or not set(contenders) <= point["contenders"].keys():
            return False
        return any_environment or point["environment"] == self.environment

    def add(self, key: str, point: Record) -> None:
        """Keep a point, and write the file."""
        self.data["points"][key] = {"environment": self.environment, **point}
        self.forget_unused_environments()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".tmp")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.path)

    def forget_unused_environments(self) -> None:
        used = {point["environment"] for point in self.data["points"].values()}
        self.data["environments"] = {k: v for k, v in self.data["environments"].items() if k in used}


def load(path: Path) -> Record | None:
    return json.loads(path.read_text()) if path.exists() else None


def load_all(folder: Path = FOLDER) -> list[Record]:
    """Every experiment's file; other JSON in the folder is not ours."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [data for data in files if isinstance(data, dict) and "experiment" in data]


def digest(environment: Record) -> str:
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]

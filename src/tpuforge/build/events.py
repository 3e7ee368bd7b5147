"""Bazel's build events: what a build made, and how it ended.

The JSON form of the build event protocol is one event a line. It states where each output is and
its digest, so nothing has to be guessed from ``bazel-bin``, where older outputs stay.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.build.checkout import TARGET


@dataclass(frozen=True)
class Built:
    """What Bazel's build events say.

    Attributes:
        finished: Whether Bazel got as far as a result.
        wheels: Every ``.whl`` among the outputs of the target, with the digest Bazel states.
    """

    finished: bool
    wheels: tuple[tuple[str, str | None], ...]


def read_events(path: Path) -> Built:
    """Find the wheel in Bazel's build events (the JSON form of the build event protocol).

    Args:
        path: The file that ``--build_event_json_file`` named.

    Returns:
        What it says; nothing finished where there is no such file. A last line that was cut off
        is left out.
    """
    finished = False
    sets: dict[str, dict[str, Any]] = {}
    roots: list[str] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        name = event.get("id", {})
        if "namedSet" in name:
            sets[name["namedSet"]["id"]] = event.get("namedSetOfFiles", {})
        elif name.get("targetCompleted", {}).get("label", "").removeprefix("@@") == TARGET:
            for group in event.get("completed", {}).get("outputGroup", []):
                if group.get("name") == "default":
                    roots += [entry["id"] for entry in group.get("fileSets", [])]
        elif "finished" in event:
            finished = True
    wheels: dict[str, str | None] = {}
    seen: set[str] = set()
    while roots:
        key = roots.pop()
        if key in seen:
            continue
        seen.add(key)
        members = sets.get(key, {})
        roots += [entry["id"] for entry in members.get("fileSets", [])]
        for file in members.get("files", []):
            if file.get("name", "").endswith(".whl"):
                wheels[file.get("uri", "")] = file.get("digest")
    return Built(finished, tuple(sorted(wheels.items())))

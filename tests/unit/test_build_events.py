"""Bazel's build events: what is read from them, the likely cause of a failure, the live line."""

from __future__ import annotations

import json
from pathlib import Path

from tpuforge.build.checkout import TARGET
from tpuforge.build.events import Built, read_events


def events(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


WHEEL = {"name": "ci/wheel/a.whl", "uri": "file:///out/a.whl", "digest": "d" * 64, "length": "6"}


def test_the_wheel_in_the_build_events(tmp_path: Path) -> None:
    path = events(
        tmp_path / "events.json",
        {"id": {"namedSet": {"id": "0"}}, "namedSetOfFiles": {"files": [WHEEL]}},
        {
            "id": {"namedSet": {"id": "1"}},
            "namedSetOfFiles": {
                "files": [{"name": "x.txt", "uri": "file:///x.txt"}],
                "fileSets": [{"id": "0"}, {"id": "1"}],
            },
        },
        {
            "id": {"namedSet": {"id": "2"}},
            "namedSetOfFiles": {"files": [{"name": "other.whl", "uri": "file:///other.whl"}]},
        },
        {
            "id": {"targetCompleted": {"label": TARGET}},
            "completed": {
                "success": True,
                "outputGroup": [
                    {"name": "default", "fileSets": [{"id": "1"}]},
                    {"name": "debug", "fileSets": [{"id": "2"}]},
                ],
            },
        },
        {
            "id": {"targetCompleted": {"label": "//other"}},
            "completed": {"outputGroup": [{"name": "default", "fileSets": [{"id": "2"}]}]},
        },
        {"id": {"buildFinished": {}}, "finished": {"exitCode": {"name": "SUCCESS"}}},
    )
    built = read_events(path)
    assert (built.finished, built.exit_name) == (True, "SUCCESS")
    assert built.wheels == (("file:///out/a.whl", "d" * 64),)
    whole = path.read_text()
    path.write_text(whole[:-30])
    built = read_events(path)
    assert (built.begun, built.finished) == (True, False)
    assert built.wheels == (("file:///out/a.whl", "d" * 64),)


def test_no_build_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none.json") == Built(False, ())

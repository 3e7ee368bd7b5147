"""What the tests of smoke's host side, bench and report share: data, and a Docker client made here.

The fake client is a Python script: it records every call and plays the engine's part, so that a
test sees exactly what the real client would have been asked. Tests of the real engine stand in
``tests/engine`` and ``tests/faults``.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

from process_support import call
from tpuforge.paths import sha256_text

SRC = Path(__file__).resolve().parents[1] / "src"
DIGEST = "sha256:" + "3f" * 32
CONFIG = "sha256:" + "c0" * 32
TIERS = ("static", "import", "compile", "simulate", "device")
HOST = {"cores": 2, "memory_bytes": 16_000_000_000, "kernel": "6.1.0", "machine": "x86_64"}

IMAGE: dict[str, Any] = {
    "schema": "tpuforge.image/1",
    "image": "runtime",
    "python": "3.11",
    "flavour": "runtime",
    "name": "tpuforge/runtime:0.2.0-py311",
    "manifest_digest": DIGEST,
    "config_digest": CONFIG,
    "compressed_bytes": 517_312_122,
    "unpacked_bytes": 2_061_211_555,
    "layers": [
        {
            "digest": f"sha256:{n:064x}",
            "compressed_bytes": n * 10**7,
            "unpacked_bytes": n * 10**8,
            "what": what,
        }
        for n, what in enumerate(("Debian bookworm", "libtpu 0.0.52", "torch 2.13.0+cpu"), 1)
    ],
    "labels": {"org.opencontainers.image.title": "runtime"},
    "key": "k" * 64,
    "lock_sha256": "ab" * 32,
    "suite_sha256": "cd" * 32,
    "notes": [],
    "run_line": "docker run --rm --device /dev/vfio tpuforge/runtime:0.2.0-py311 health",
}


def check(name: str, tier: str, status: str = "passed", **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "tier": tier,
        "purpose": f"{name} holds",
        "severity": "critical",
        "remedy": "./forge bake",
        "status": status,
        "detail": "",
        "seconds": 0.5,
        "peak_memory_bytes": 205_000_000,
        "figures": {"files": 12},
        **more,
    }


def health(verdict: str = "healthy", exit_code: int = 0, **more: Any) -> dict[str, Any]:
    failed = "failed" if verdict == "unhealthy" else "passed"
    checks = [
        check("static.closure", "static"),
        check("import.torch", "import", failed, detail="undefined symbol: x"),
        check("device.readme", "device", "not run", detail="no TPU found"),
    ]
    if verdict == "device":
        checks[-1] = check("device.usable", "device", "failed", detail="in use")
    tiers = {}
    for tier in TIERS:
        mine = [item["status"] for item in checks if item["tier"] == tier]
        status = next((s for s in ("failed", "passed") if s in mine), "not run")
        tiers[tier] = {
            "status": status,
            "why": "no TPU found" if tier == "device" else "",
            "asked": True,
            "required": tier in ("static", "import"),
            "seconds": 1.5,
            "peak_memory_bytes": 205_000_000,
            "passed": mine.count("passed"),
            "failed": mine.count("failed"),
            "not_run": mine.count("not run"),
        }
    return {
        "schema": "tpuforge.health/1",
        "image": None,
        "started": "2026-11-30T12:00:00+00:00",
        "seconds": 3.0,
        "host": HOST,
        "selection": None,
        "trouble": "the suite stopped" if verdict == "unjudged" else None,
        "verdict": verdict,
        "exit_code": exit_code,
        "highest_tier": "import",
        "tiers": tiers,
        "checks": checks,
        "packages": [{"name": "torch", "version": "2.13.0+cpu"}],
        **more,
    }


def bench() -> dict[str, Any]:
    return {
        "schema": "tpuforge.bench/1",
        "started": "2026-11-30T12:00:00+00:00",
        "seconds": 9.0,
        "host": HOST,
        "measurements": [
            {
                "id": "import.warm",
                "what": "import torch",
                "unit": "s",
                "samples": [2.0, 3.0, 4.0],
                "min": 2.0,
                "median": 3.0,
                "max": 4.0,
                "not_run": None,
                "failed": False,
            },
            {
                "id": "import.cold",
                "what": "import torch, cold",
                "unit": "s",
                "samples": [],
                "min": None,
                "median": None,
                "max": None,
                "not_run": "in use",
                "failed": False,
            },
        ],
    }


def write(path: Path, value: Any) -> str:
    """Put JSON at a path; its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(value).encode()
    path.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def fill(
    out: Path, *, health_data: Any = None, bench_data: Any = None, digest: str = DIGEST
) -> dict[str, Any]:
    """An out folder with an image and, if given, its health and bench of some digest."""
    image = deepcopy(IMAGE)
    write(out / "images/runtime-py311/image.json", image)
    for kind, data in (("health", health_data), ("bench", bench_data)):
        if data is not None:
            folder = out / kind / "runtime-py311"
            sha256 = write(folder / f"{kind}.json", data)
            record = {"schema": "tpuforge.run/1", "manifest_digest": digest, "sha256": sha256}
            write(folder / "run.json", record)
    return image


def owner(out: Path) -> str:
    """What marks the containers and the name of a run with this out folder, and no other's."""
    return sha256_text(str(out))[:16]


def forge(module: str, *arguments: str, out: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a verb with an out folder of its own, in this process: most of a start is imports."""
    said, told = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, verb_env(out, **env), clear=True),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(told),
    ):
        code = importlib.import_module(f"tpuforge.{module}").main(arguments)
    return subprocess.CompletedProcess(arguments, int(code), said.getvalue(), told.getvalue())


def forge_apart(
    module: str, *arguments: str, out: Path, timeout: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb as a user's shell would, as a process of its own."""
    return call(
        [sys.executable, "-m", f"tpuforge.{module}", *arguments],
        env=verb_env(out, **env),
        timeout=timeout,
    )


def verb_env(out: Path, **env: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TPUFORGE_")}
    return {
        **kept,
        "PYTHONPATH": str(SRC),
        "TPUFORGE_OUT": str(out),
        "COLUMNS": "200",
        "NO_COLOR": "1",
        **env,
    }


FAKE_DOCKER = '''
"""A Docker client that plays the engine's part; its folder says how."""
import os, sys

# most of a call would be imports: what is read and written is Python's own notation
HERE = os.path.dirname(os.path.realpath(__file__))
words = sys.argv[1:]
with open(HERE + "/play") as file:
    play = eval(file.read())
with open(HERE + "/calls", "a") as calls:
    print({"words": words, "host": os.environ.get("DOCKER_HOST")}, file=calls)
if words[0] == "version":
    print("26.1.5")
elif words[:2] == ["image", "inspect"]:
    if words[-1] not in play["holds"]:
        sys.exit("Error: No such image: " + words[-1])
    print(play["holds"][words[-1]])
elif words[0] == "tag":
    if words[1] not in play["holds"]:
        sys.exit("Error response from daemon: No such image: " + words[1])
elif words[0] == "ps":
    print("\\n".join(play.get("left", [])))
elif words[0] == "load":
    if "lose" in play:
        os.unlink(play["lose"])
    sys.stdin.buffer.read()
    play["holds"].update(play.get("loads", {}))
    with open(HERE + "/play", "w") as file:
        print(play, file=file)
elif words[0] == "run":
    import csv, json, time
    from pathlib import Path

    HERE = Path(HERE)
    mounts = [next(csv.reader([w])) for f, w in zip(words, words[1:]) if f == "--mount"]
    places = {}
    for fields in mounts:
        pairs = dict(f.partition("=")[::2] for f in fields)
        places[pairs["target"]] = pairs.get("source")
    def here(path):
        return Path(places["/results"], Path(path).name)
    image = next(word for word in words if word.startswith("sha256:"))
    report, code = play.get("reports", {}).get(image, (play.get("report"), play.get("code", 0)))
    (HERE / "running").write_text(str(os.getpid()))
    (HERE / ("met-" + image[7:])).touch()
    deadline = time.monotonic() + 60
    while (
        len(list(HERE.glob("met-*"))) < play.get("meet", 0)
        or not Path(HERE, play.get("until", "running")).exists()
    ):
        if time.monotonic() > deadline:
            sys.exit("it waited in vain")
        time.sleep(0.02)
    for flag in ("--json", "--junit", "--html"):
        if flag in words and report is not None:
            text = json.dumps(report) if flag == "--json" else "<x/>"
            here(words[words.index(flag) + 1]).write_text(text)
    print("some output")
    sys.exit(code)
'''


def fake_engine(out: Path, folder: Path, **play: Any) -> Path:
    """Record an engine whose client is a script, and say how it behaves.

    Args:
        out: The out folder of the verb.
        folder: Where the client stands; ``calls`` there gets every call.
        **play: ``holds`` (reference to id), ``loads`` (held after a load), ``lose`` (a file that
            vanishes while it loads), ``report`` (what a run leaves), ``code`` (its exit code),
            ``reports`` (both, by image), ``until`` (a file of the folder that a run waits for),
            ``meet`` (how many images must run at the same time), ``left`` (containers).
    """
    folder.mkdir(parents=True, exist_ok=True)
    client = folder / "docker"
    # through a shell: a first line cannot name an interpreter in a folder with spaces
    (folder / "docker.py").write_text(FAKE_DOCKER, encoding="utf-8")
    client.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -IS '{folder / 'docker.py'}' \"$@\"\n",
        encoding="utf-8",
    )
    client.chmod(0o755)
    (folder / "play").write_text(repr({"holds": {DIGEST: DIGEST}, **play}), encoding="utf-8")
    write(
        out / "engine/engine.json",
        {
            "schema": "tpuforge.engine/1",
            "docker_host": "unix:///nowhere.sock",
            "env": {"DOCKER_HOST": "unix:///nowhere.sock"},
            "docker": str(client),
        },
    )
    return folder


def calls(folder: Path, what: str = "words") -> list[Any]:
    """The arguments of every call of a fake client, or the ``host`` that it was told."""
    path = folder / "calls"
    if not path.exists():
        return []
    return [ast.literal_eval(line)[what] for line in path.read_text().splitlines()]


def runs(folder: Path) -> list[list[str]]:
    """Those of its calls that ran a container."""
    return [words for words in calls(folder) if words[0] == "run"]

"""What the tests of the engine share: a stand-in for the Docker client, and the verb's runner.

The stand-in answers each command line from a JSON file, so that every kind of Docker (old, classic,
without buildx, silent) can be met without having one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from process_support import call
from tpuforge.images import engine as verb

SRC = Path(__file__).resolve().parents[1] / "src"
CONTAINERD = [["driver-type", "io.containerd.snapshotter.v1"]]

_STAND_IN = """#!{python}
import json, os, sys
answers = json.load(open({answers!r}))
line = " ".join(sys.argv[1:])
for start, (code, output) in answers.items():
    if line.startswith(start):
        print(output.replace("@HOST", os.environ.get("DOCKER_HOST", "")))
        sys.exit(code)
sys.exit("docker: unexpected: " + line)
"""

Answers = dict[str, tuple[int, str]]


def info(
    engine: str = "27.3.1",
    *,
    buildx: str | None = "v0.17.1",
    driver: object = CONTAINERD,
    machine: str = "x86_64",
) -> Answers:
    """What ``docker info`` says in the form that the verb asks for."""
    plugins = [{"Name": "buildx", "Version": buildx}] if buildx else [{"Name": "compose"}]
    facts = {
        "server": engine,
        "driver": driver,
        "init": "docker-init",
        "os": "linux",
        "machine": machine,
        "plugins": plugins,
    }
    return {"info": (0, json.dumps(facts))}


def silent(words: str) -> Answers:
    """What ``docker info`` says when no daemon answers."""
    return {"info": (1, '{"server":"","driver":null,"plugins":[]}\n' + words)}


def builder(
    name: str = "default",
    buildkit: str = "v0.16.0",
    driver: str = "docker",
    status: str = "running",
) -> Answers:
    """What ``docker buildx inspect NAME`` says."""
    text = (
        f"Name:          {name}\nDriver:        {driver}\n\nNodes:\nName:             {name}\n"
        f"Endpoint:         {name}\nStatus:           {status}\nBuildKit version: {buildkit}\n"
    )
    return {f"buildx inspect {name}": (0, text)}


def client(folder: Path, answers: Answers) -> Path:
    """A folder for PATH that holds the stand-in as ``docker``."""
    folder.mkdir(parents=True)
    (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    program = folder / "docker"
    text = _STAND_IN.format(python=sys.executable, answers=str(folder / "answers.json"))
    program.write_text(text, encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def environment(out: Path, path: Path | str | None = None, **extra: str) -> dict[str, str]:
    """The environment of the verb: no Docker named, its own out folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TPUFORGE_", "DOCKER_"))}
    env |= {"PYTHONPATH": str(SRC), "TPUFORGE_OUT": str(out), "NO_COLOR": "1"}
    if path is not None:
        env["PATH"] = str(path)
    return env | extra


def engine(env: dict[str, str], *arguments: str, prefix: Sequence[str] = ()) -> tuple[int, str]:
    """Run the verb; its exit code and all it said."""
    done = call([*prefix, sys.executable, "-m", "tpuforge.images.engine", *arguments], env=env)
    return done.returncode, done.stdout + done.stderr


def probe(env: dict[str, str], *arguments: str, as_user: bool = False) -> tuple[int, str]:
    """Run the verb in this process; its exit code and all it said.

    ``as_user`` has it believe that it does not run as root.
    """
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(os, "geteuid", lambda: 1000 if as_user else os.getuid()),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        code = verb.main(arguments)
    return code, said.getvalue()


def record(out: Path) -> dict[str, object]:
    """The engine's record."""
    found = json.loads((out / "engine" / "engine.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found

"""A later pip or uv in the image: torch stays a CPU build, or the installation fails aloud."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Image
from process_support import call
from tpuforge.pins import load

TORCH = "2.13.0+cpu"
HELPER = ROOT / "tests" / "guard_indexes.py"
MAIN = "http://127.0.0.1:8000/simple"
PIP = "python -m pip install --no-cache-dir"
INTO = "python -m pip --python {} install --no-cache-dir -q"
UV = "uv pip install --no-cache"
NEW = "wants-new-torch"


def command(
    text: str, *, python: str = "python", without: tuple[str, ...] = (), **more: str
) -> dict[str, Any]:
    """One installation: its command line, the environment it is about, other variables."""
    return {"command": text, "python": python, "without": without, "with": more}


COMMANDS = {
    "pip plain": command(f"{PIP} wants-torch"),
    "pip upgrade": command(f"{PIP} -U torch"),
    "pip eager": command(f"{PIP} -U --upgrade-strategy eager wants-torch"),
    "pip isolated": command(f"{PIP} --isolated --index-url {MAIN} -U torch"),
    "pip without its variable": command(f"{PIP} -U torch", without=("PIP_CONSTRAINT",)),
    "pip newer": command(f"{PIP} torch==2.99.0"),
    "pip wants newer": command(f"{PIP} {NEW}"),
    "pip fresh": command(
        f"python -m venv --without-pip /tmp/p && {INTO.format('/tmp/p/bin/python')} wants-torch",
        python="/tmp/p/bin/python",
    ),
    "pip fresh, again": command(
        f"{INTO.format('/tmp/p/bin/python')} --force-reinstall torch",
        python="/tmp/p/bin/python",
    ),
    "pip own constraint": command(
        "echo 'wants-torch<2' > /tmp/own && python -m venv --without-pip /tmp/o && "
        f"{INTO.format('/tmp/o/bin/python')} wants-torch",
        python="/tmp/o/bin/python",
        PIP_CONSTRAINT="/tmp/own",
    ),
    "uv plain": command(f"{UV} wants-torch"),
    "uv upgrade": command(f"{UV} -U torch"),
    "uv eager": command(f"{UV} -U wants-torch"),
    "uv without its files": command(f"{UV} --no-config -U torch"),
    "uv without its variables": command(
        f"{UV} -U torch", without=("UV_CONSTRAINT", "UV_TORCH_BACKEND")
    ),
    "uv newer": command(f"{UV} torch==2.99.0"),
    "uv wants newer": command(f"{UV} {NEW}"),
    "uv fresh": command(
        f"uv venv -q /tmp/u && {UV} wants-torch", python="/tmp/u/bin/python", VIRTUAL_ENV="/tmp/u"
    ),
    "uv fresh, again": command(
        f"{UV} --reinstall torch", python="/tmp/u/bin/python", VIRTUAL_ENV="/tmp/u"
    ),
}
REFUSED = [name for name in COMMANDS if name.endswith("newer")]
OWN = "pip own constraint"
KEPT = [name for name in COMMANDS if name not in (*REFUSED, OWN)]


@pytest.fixture(scope="module")
def came(image: Image, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each installation came to, all in one container without a network."""
    folder = tmp_path_factory.mktemp("guard")
    index = load().torch.index
    host = urllib.parse.urlsplit(index).hostname
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    by = ("-CA", "ca.pem", "-CAkey", "ca-key.pem")
    for name, subject, more in (
        ("ca", "tests", ()),
        ("own", host, (*by, "-addext", f"subjectAltName=DNS:{host}")),
    ):
        words = ["openssl", "req", "-x509", *new, "-subj", f"/CN={subject}", *more]
        constraint = f"basicConstraints=critical,CA:{str(name == 'ca').upper()}"
        words += ["-addext", constraint, "-keyout", f"{name}-key.pem", "-out", f"{name}.pem"]
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        uv = Path(sys.executable).parent / "uv"
    words = ["run", "--rm", "-i", "--network=none", "--user=0:0", f"--add-host={host}:127.0.0.1"]
    for source, target in ((HELPER, "/helper.py"), (folder, "/tls"), (uv, "/usr/local/bin/uv")):
        words.append(f"--mount=type=bind,source={source},target={target},readonly")
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        words.append(f"--env={name}={MAIN}")
    words += ["--env=PIP_ROOT_USER_ACTION=ignore"]
    words += ["--env=SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt", image.name]
    words += ["python", "/helper.py", index, TORCH, "/tls"]
    done = call(
        [image.engine.docker, *words], env=image.engine.env, input=json.dumps(COMMANDS), timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", KEPT)
def test_torch_stays(came: dict[str, dict[str, Any]], name: str) -> None:
    one = came[name]
    assert one["code"] == 0, one["said"]
    assert one["torch"] == TORCH
    assert one["nvidia"] == []
    if "plain" in name or "fresh" in name:
        assert one["wants"], "the package itself did not come in"


@pytest.mark.parametrize("name", REFUSED)
def test_another_torch_is_refused_aloud(came: dict[str, dict[str, Any]], name: str) -> None:
    one = came[name]
    assert one["code"] != 0
    assert one["torch"] == TORCH
    assert one["nvidia"] == []
    assert "torch==2.13.0+cpu" in one["said"].replace(" ", ""), one["said"]
    assert NEW not in one["wants"]


def test_an_own_constraint_replaces_the_images_and_the_index_still_gives_a_cpu_build(
    came: dict[str, dict[str, Any]],
) -> None:
    one = came[OWN]
    assert one["code"] == 0, one["said"]
    # no longer held to the locked number, which the health suite tells (static.guard-env)
    assert one["torch"] == "2.99.0+cpu"
    assert one["nvidia"] == []


def test_health_notices_an_own_constraint(image: Image, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("numpy<3\n")
    options = ("--network=none", "--read-only", "--tmpfs=/tmp", "--env=PIP_CONSTRAINT=/own.txt")
    mount = f"--mount=type=bind,source={tmp_path / 'own.txt'},target=/own.txt,readonly"
    words = ("health", "--tier=static", "-k", "guard", "--json", "-")
    done = image.run(*words, options=(*options, mount))
    checks = {one["id"]: one for one in json.loads(done.stdout)["checks"]}
    own = checks["static.guard-env"]
    assert (own["status"], own["severity"]) == ("failed", "warning"), done.stdout
    assert "PIP_CONSTRAINT was replaced" in own["detail"]
    assert checks["static.guard"]["status"] == "passed"

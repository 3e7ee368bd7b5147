"""The startup script of a TPU VM and its service, with a metadata server on the loopback."""

from __future__ import annotations

import http.server
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_support import call
from tpu_vm_support import FOLDER, IMAGE

STUB = '#!/bin/sh\necho "$(basename "$0") $*" >>"$(dirname "$0")/asked"\n'


class Vm:
    """A VM that is about to start: its metadata, its root folder, its programs.

    Args:
        folder: Where all of it is.
        server: The address of its metadata server.
        metadata: What the server gives.
    """

    def __init__(self, folder: Path, server: str, metadata: dict[str, bytes]) -> None:
        self.root = folder / "root"
        self.server = server
        self.metadata = metadata
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.root.mkdir()
        for name in ("systemctl", "apt-get", "docker"):
            (self.programs / name).write_text(STUB)
            (self.programs / name).chmod(0o755)

    def start(self) -> subprocess.CompletedProcess[str]:
        """Run the script."""
        env = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "TPU_RUN_METADATA": self.server,
            "TPU_RUN_ROOT": str(self.root),
        }
        return call([FOLDER / "startup.sh"], env=env, timeout=60)

    @property
    def asked(self) -> list[str]:
        """What was asked of the programs."""
        path = self.programs / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def settings(self) -> dict[str, str]:
        """The settings, read as systemd reads them: its double quotes are those of a shell here."""
        text = (self.root / "etc/tpu-run/tpu-run.conf").read_text()
        pairs = (line.partition("=") for line in text.splitlines())
        return {name: "".join(shlex.split(value)) for name, _, value in pairs}


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[Vm]:
    """A VM that was created as the documentation says."""
    metadata = {
        "tpu-run": (FOLDER / "tpu-run").read_bytes(),
        "tpu-run-service": (FOLDER / "tpu-run.service").read_bytes(),
        "tpu-run-image": IMAGE.encode(),
        "tpu-run-command": b'python -c "print(1)" \\n',
    }

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = metadata.get(self.path.rpartition("/")[2])
            right = self.headers["Metadata-Flavor"] == "Google" and known != b"refused"
            self.send_response(403 if not right else 404 if known is None else 200)
            self.end_headers()
            self.wfile.write(
                (b"<html>Not Found</html>" if known is None else known) if right else b""
            )

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Vm(tmp_path, f"http://127.0.0.1:{server.server_port}/attributes", metadata)
        server.shutdown()


def test_it_installs_what_the_metadata_hold_and_starts_it(vm: Vm) -> None:
    done = vm.start()
    assert done.returncode == 0, done.stderr
    program = vm.root / "usr/local/bin/tpu-run"
    assert program.read_bytes() == vm.metadata["tpu-run"]
    assert os.access(program, os.X_OK)
    unit = vm.root / "etc/systemd/system/tpu-run.service"
    assert unit.read_bytes() == vm.metadata["tpu-run-service"]
    assert vm.settings() == {
        "TPU_RUN_IMAGE": IMAGE,
        "TPU_RUN_COMMAND": 'python -c "print(1)" \\n',
        "TPU_RUN_OPTIONS": "",
    }
    assert vm.asked == [
        "systemctl daemon-reload",
        "systemctl enable tpu-run.service",
        "systemctl restart tpu-run.service",
    ]
    assert not list(vm.root.rglob("*.part"))


def test_the_metadata_of_the_next_boot_win(vm: Vm) -> None:
    vm.metadata["tpu-run-key"] = b"-----BEGIN PUBLIC KEY-----\n"
    vm.metadata["tpu-run-options"] = b"--shm-size 8g -e A=$B"
    assert vm.start().returncode == 0
    key = vm.root / "etc/tpu-run/cosign.pub"
    assert key.read_bytes() == vm.metadata["tpu-run-key"]
    options = "--key /etc/tpu-run/cosign.pub --shm-size 8g -e A=$B"
    assert vm.settings()["TPU_RUN_OPTIONS"] == options
    del vm.metadata["tpu-run-key"], vm.metadata["tpu-run-command"]
    assert vm.start().returncode == 0
    assert not key.exists()
    assert vm.settings() == {"TPU_RUN_IMAGE": IMAGE, "TPU_RUN_OPTIONS": "--shm-size 8g -e A=$B"}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tpu-run", None, "no metadata tpu-run\n"),
        ("tpu-run", b"<html>", "not the program"),
        ("tpu-run-service", None, "no metadata tpu-run-service\n"),
        ("tpu-run-image", None, "no metadata tpu-run-image\n"),
        ("tpu-run-image", b"", "metadata tpu-run-image is empty"),
        # an image that a key was asked for must not run without
        ("tpu-run-key", b"refused", "does not answer for tpu-run-key (status 403)"),
        ("tpu-run-options", b"refused", "does not answer for tpu-run-options (status 403)"),
        ("tpu-run-command", b"python\nrm", "metadata tpu-run-command has more than one line"),
        ("tpu-run-options", b"-e\nA", "metadata tpu-run-options has more than one line"),
    ],
)
def test_metadata_that_make_no_sense_start_nothing(
    vm: Vm, name: str, value: bytes | None, says: str
) -> None:
    assert vm.start().returncode == 0
    before = vm.settings()
    (vm.programs / "asked").unlink()
    if value is None:
        del vm.metadata[name]
    else:
        vm.metadata[name] = value
    done = vm.start()
    assert done.returncode == 2
    assert says in done.stderr
    assert vm.asked == []
    assert vm.settings() == before


def test_a_vm_without_docker_gets_it(vm: Vm) -> None:
    (vm.programs / "docker").unlink()
    for name in ("sh", "mkdir", "curl", "head", "grep", "chmod", "mv", "rm", "sed", "dirname"):
        (vm.programs / name).symlink_to(str(shutil.which(name)))
    (vm.programs / "basename").symlink_to(str(shutil.which("basename")))
    env = {
        "PATH": str(vm.programs),
        "TPU_RUN_METADATA": vm.server,
        "TPU_RUN_ROOT": str(vm.root),
    }
    done = call([FOLDER / "startup.sh"], env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert vm.asked[:2] == ["apt-get update -qq", "apt-get install -y -qq docker.io"]


def test_systemd_finds_nothing_wrong_with_the_service(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("not run: there is no systemd-analyze on PATH (apt-get install systemd)")
    text = (FOLDER / "tpu-run.service").read_text()
    start = "ExecStart=/usr/local/bin/tpu-run "
    assert text.count(start) == 1

    def verify(name: str, text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).write_text(text)
        return call([analyze, "verify", "--man=no", str(tmp_path / name)], timeout=60)

    # it wants to see the program that it starts
    here = text.replace(start, f"ExecStart={FOLDER / 'tpu-run'} ")
    done = verify("tpu-run.service", here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = verify("wrong.service", here.replace("RestartSec=30s", "RestartSecond=30s"))
    assert "RestartSecond" in wrong.stderr
    rated = call(
        [
            analyze,
            "security",
            "--offline=true",
            "--threshold=40",
            str(tmp_path / "tpu-run.service"),
        ],
        timeout=60,
    )
    # 0 is best, 10 (100 here) worst; without the hardening it is 96
    assert rated.returncode == 0, rated.stdout[-400:] + rated.stderr

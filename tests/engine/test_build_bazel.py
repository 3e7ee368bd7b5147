"""``build_wheel`` with the real Bazelisk and a real Bazel, on a small workspace of the same shape.

Both come from npm: Bazelisk is the pinned one; Bazel is an old release, the newest that npm ships
as a file. The workspace has the target, the flag and the two configurations that TorchTPU's own
source has; its "wheel" is six bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from build_support import Checkout, kill, make_checkout, wait_for

MODULE = "tpuforge.build.source"
WHEEL = "torch_tpu-0.2.0-cp311-cp311-manylinux_2_31_x86_64.whl"
BAZEL = "@bazel/bazel-linux_x64@2.1.0"
BAZEL_FILE = "bazel-2.1.0-linux-x86_64"
BAZEL_SHA256 = "e13581d44faad6ac807dd917e682fef20359d26728166ac35dadd8ee653a580d"

FILES = {
    "WORKSPACE": 'workspace(name = "small")\n',
    "BUILD": """
load("//:defs.bzl", "bool_flag")
bool_flag(
    name = "wheel_build",
    build_setting_default = False,
    visibility = ["//visibility:public"],
)
""",
    "defs.bzl": """
On = provider(fields = ["on"])

def _flag(ctx):
    return [On(on = ctx.build_setting_value)]

bool_flag = rule(implementation = _flag, build_setting = config.bool(flag = True))

def _wheel(ctx):
    if not ctx.attr._flag[On].on:
        fail("build it with --config=wheel_common")
    tag = "cp" + ctx.var["PYTHON_VERSION"].replace(".", "")
    name = "torch_tpu-0.2.0-%s-%s-manylinux_2_31_x86_64.whl" % (tag, tag)
    out = ctx.actions.declare_file(name)
    ctx.actions.run_shell(outputs = [out], command = ctx.attr.command + " > " + out.path)
    return [DefaultInfo(files = depset([out]))]

wheel = rule(
    implementation = _wheel,
    attrs = {
        "command": attr.string(),
        "_flag": attr.label(default = "//:wheel_build"),
    },
)
""",
    ".bazelrc": """
build:wheel_common --//:wheel_build=True
build:wheel_common --remote_executor=grpc://127.0.0.1:1
build:no_rbe --remote_executor=
""",
}


def set_command(workspace: Path, command: str) -> None:
    """Let the workspace make its wheel by another shell command."""
    package = workspace / "ci" / "wheel"
    package.mkdir(parents=True, exist_ok=True)
    (package / "BUILD").write_text(
        f'load("//:defs.bzl", "wheel")\nwheel(name = "torch_tpu_wheel", command = "{command}")\n'
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return make_checkout(tmp_path_factory.mktemp("bazel") / "checkout")


@pytest.fixture(scope="module")
def workspace(checkout: Checkout) -> Path:
    folder = checkout.root / "workspace"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip())
    set_command(folder, "echo wheel")
    return folder


@pytest.fixture(scope="module")
def bazel(checkout: Checkout) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, and Bazelisk and Bazel come from it here")
    subprocess.run(["npm", "pack", "--silent", BAZEL], cwd=checkout.root, check=True)
    (package,) = checkout.root.glob("*.tgz")
    with tarfile.open(package) as tar:
        tar.extract(f"package/{BAZEL_FILE}", checkout.root, filter="data")
    path = checkout.root / "package" / BAZEL_FILE
    assert hashlib.sha256(path.read_bytes()).hexdigest() == BAZEL_SHA256
    path.chmod(0o755)
    return path


def left_running(checkout: Checkout) -> list[str]:
    """Command lines of processes that work in this checkout."""
    mark = os.fsencode(checkout.out)
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if mark in line:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def arguments(workspace: Path, bazel: Path) -> list[str]:
    return ["--source", str(workspace), "--bazel", str(bazel), "--python", "3.11"]


def test_a_wheel_from_source(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    poison = {"USE_BAZEL_VERSION": "99.0.0", "BAZELISK_BASE_URL": "http://127.0.0.1:1"}
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, env=poison, timeout=300)
    assert done.returncode == 0, done.stderr
    wheel = checkout.out / "wheels" / WHEEL
    assert wheel.read_bytes() == b"wheel\n"
    check = ["sha256sum", "-c", f"{WHEEL}.sha256"]
    assert subprocess.run(check, cwd=wheel.parent, check=False).returncode == 0
    record = json.loads((checkout.out / "results" / "build_wheel.json").read_text())
    assert record["data"]["sha256"] == hashlib.sha256(b"wheel\n").hexdigest()
    assert record["data"]["bazelisk"]["origin"] in ("PATH", "npm")
    assert list((checkout.out / "bazel").glob("run-*")) == []
    assert left_running(checkout) == []


def test_an_older_wheel_in_bazel_bin_is_not_taken(
    checkout: Checkout, workspace: Path, bazel: Path
) -> None:
    folder = workspace / "bazel-bin" / "ci" / "wheel"
    (folder / "torch_tpu-9.9.9-cp311-cp311-manylinux_2_31_x86_64.whl").write_bytes(b"old")
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert [p.name for p in (checkout.out / "wheels").glob("*.whl")] == [WHEEL]


def test_a_build_that_fails(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    set_command(workspace, "false")
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=300)
    set_command(workspace, "echo wheel")
    assert done.returncode == 1
    assert "Bazel ended with exit code 1" in done.stderr
    assert "build_wheel.log" in done.stderr
    assert left_running(checkout) == []


def test_a_bazel_that_never_comes(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    nowhere = ["--bazel", "7.7.1", "--bazel-url", "http://127.0.0.1:1"]
    done = checkout.run(
        *arguments(workspace, bazel), *nowhere, "--limit-hours", "0.002", module=MODULE, timeout=300
    )
    assert done.returncode == 2
    assert "building the wheel: not done after 7 s; ended" in done.stderr
    assert left_running(checkout) == []


def test_interrupted_then_killed_then_again(
    checkout: Checkout, workspace: Path, bazel: Path
) -> None:
    mark = checkout.root / "begun"
    set_command(workspace, f"touch {mark}; sleep 97; echo wheel")
    command = [*arguments(workspace, bazel)]
    child = checkout.start(*command, module=MODULE)
    wait_for(mark.exists, 120)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in err
    assert left_running(checkout) == []
    mark.unlink()
    child = checkout.start(*command, module=MODULE)
    wait_for(mark.exists, 120)
    kill(child)
    assert left_running(checkout) != []
    set_command(workspace, "echo wheel")
    done = checkout.run(*command, module=MODULE, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (checkout.out / "wheels" / WHEEL).read_bytes() == b"wheel\n"
    assert left_running(checkout) == []


def test_a_tampered_bazelisk(checkout: Checkout, workspace: Path, bazel: Path) -> None:
    fetched = list((checkout.out / "bazel" / "bazelisk").glob("*/*"))
    if not fetched:
        pytest.skip("a Bazelisk of the user's own is on PATH, so none was fetched")
    with fetched[0].open("ab") as file:
        file.write(b"x")
    done = checkout.run(*arguments(workspace, bazel), module=MODULE, timeout=60)
    assert done.returncode == 1
    assert "has SHA-256" in done.stderr

"""A small workspace of the shape of TorchTPU's source, and a real Bazel to build it with.

Bazel comes from npm: an old release, the newest that npm ships as a file. The workspace has the
target, the flag and the two configurations that TorchTPU's own source has; its "wheel" is six
bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from build_support import Checkout

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


def make_workspace(folder: Path) -> Path:
    """A fresh workspace whose wheel is six bytes."""
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip())
    set_command(folder, "echo wheel")
    return folder


def get_bazel(folder: Path) -> Path:
    """A Bazel that runs here, unpacked into a folder; skips the test where npm is not there."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, and Bazelisk and Bazel come from it here")
    subprocess.run(["npm", "pack", "--silent", BAZEL], cwd=folder, check=True)
    (package,) = folder.glob("*.tgz")
    with tarfile.open(package) as tar:
        tar.extract(f"package/{BAZEL_FILE}", folder, filter="data")
    package.unlink()
    path = folder / "package" / BAZEL_FILE
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

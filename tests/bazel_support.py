"""A small workspace of the shape of TorchTPU's source, and a real Bazel to build it with.

Bazel comes from npm: an old release, the newest that npm ships as a file. The workspace has the
target, the flag and the two configurations that TorchTPU's own source has, and takes the suffix of
the version from the same variable; its wheel is a small one that lies in it and passes the audit.
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
from elf_support import PYBIND, torch_tpu_wheel
from process_support import call

MODULE = "tpuforge.build.source"
ON_HOST = ("--where", "host")
WHEEL = "torch_tpu-0.2.0-cp311-cp311-manylinux_2_31_x86_64.whl"
BAZEL = "@bazel/bazel-linux_x64@2.1.0"
BAZEL_FILE = "bazel-2.1.0-linux-x86_64"
BAZEL_SHA256 = "e13581d44faad6ac807dd917e682fef20359d26728166ac35dadd8ee653a580d"

FLAG = """
On = provider(fields = ["on"])

def _flag(ctx):
    return [On(on = ctx.build_setting_value)]

bool_flag = rule(implementation = _flag, build_setting = config.bool(flag = True))
"""
"""The flag that a wheel is built with, in Starlark."""
FILES = {
    "WORKSPACE": """
workspace(name = "small")
load("//:version.bzl", "version_repo")
version_repo(name = "version")
""",
    "version.bzl": """
def _version(ctx):
    ctx.file("BUILD", "")
    ctx.file("extras.bzl", "EXTRAS = '%s'" % ctx.os.environ.get("WHEEL_VERSION_EXTRAS", ""))

version_repo = repository_rule(implementation = _version, environ = ["WHEEL_VERSION_EXTRAS"])
""",
    ".gitignore": "bazel-*\n",
    "BUILD": """
load("//:defs.bzl", "bool_flag")
bool_flag(
    name = "wheel_build",
    build_setting_default = False,
    visibility = ["//visibility:public"],
)
""",
    "defs.bzl": FLAG
    + """
def _wheel(ctx):
    if not ctx.attr._flag[On].on:
        fail("build it with --config=wheel_common")
    tag = "cp" + ctx.var["PYTHON_VERSION"].replace(".", "")
    version = "0.2.0" + ctx.attr.extras
    name = "torch_tpu-%s-%s-%s-manylinux_2_31_x86_64.whl" % (version, tag, tag)
    out = ctx.actions.declare_file(name)
    ctx.actions.run_shell(
        inputs = ctx.files.srcs,
        outputs = [out],
        command = ctx.attr.command.replace("NAME", name) + " > " + out.path,
    )
    return [DefaultInfo(files = depset([out]))]

wheel = rule(
    implementation = _wheel,
    attrs = {
        "command": attr.string(),
        "extras": attr.string(),
        "srcs": attr.label_list(allow_files = True),
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


GOOD = "cat ci/wheel/NAME"
"""The command that makes a wheel that passes: NAME is its file name."""


def set_command(workspace: Path, command: str) -> None:
    """Let the workspace make its wheel by another shell command."""
    package = workspace / "ci" / "wheel"
    package.mkdir(parents=True, exist_ok=True)
    (package / "BUILD").write_text(
        'load("//:defs.bzl", "wheel")\nload("@version//:extras.bzl", "EXTRAS")\n'
        f'wheel(name = "torch_tpu_wheel", command = "{command}", extras = EXTRAS, '
        'srcs = glob(["*.whl"]))\n'
    )


def add_wheel(workspace: Path, python: str = "3.11", suffix: str = "") -> Path:
    """Put a wheel that passes the audit where the workspace takes it from."""
    made = torch_tpu_wheel()
    tag = f"cp{python.replace('.', '')}"
    old, made.version = made.version, f"{made.version}{suffix}"
    made.tags = made.tags.replace("cp311", tag)
    files, made.files = made.files, {}
    for name, content in files.items():
        changed = content
        if ".dist-info/" in name:
            changed = content.replace(old.encode(), made.version.encode(), 1)
            changed = changed.replace(b"cp311", tag.encode())
        made.files[name.replace(f"-{old}.", f"-{made.version}.")] = changed.replace(
            PYBIND + b"3.11\0", PYBIND + f"{python}\0".encode()
        )
    return made.write(workspace / "ci" / "wheel")


def make_workspace(folder: Path) -> Path:
    """A fresh workspace that makes a good wheel for Python 3.11."""
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text.lstrip())
    set_command(folder, GOOD)
    add_wheel(folder)
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


def commit(workspace: Path, tag: str) -> str:
    """Make the workspace a git repository, or add a commit to it; its commit, at a fixed time."""
    moment = "2026-11-30T12:34:56Z"
    env = {"PATH": os.defpath, "GIT_AUTHOR_DATE": moment, "GIT_COMMITTER_DATE": moment}
    git = ["git", "-C", str(workspace), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"], ["tag", tag]):
        subprocess.run([*git, *words], check=True, env=env)
    asked = [*git, "rev-parse", "HEAD"]
    return call(asked, check=True).stdout.strip()


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
    return [*("--source", str(workspace), "--bazel", str(bazel), "--python", "3.11"), *ON_HOST]

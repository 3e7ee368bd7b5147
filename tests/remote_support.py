"""What the tests of remote caches and executors share: a workspace, and a cache on the loopback.

The workspace has the target, the flag and the two configurations of TorchTPU's own source. It
copies files, an action each, and packs them into a wheel. The moment of packing goes into the zip,
as it does with a careless packer: two builds make the same bytes only once they are normalised.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bazel_support import FILES, FLAG, MODULE, WHEEL, arguments
from build_support import Checkout, sha256
from elf_support import torch_tpu_wheel
from server_support import Handler, serving

_FILES = {
    "WORKSPACE": 'workspace(name = "small")\n',
    "BUILD": FILES["BUILD"],
    "defs.bzl": FLAG
    + """
def _wheel(ctx):
    if not ctx.attr._flag[On].on:
        fail("build it with --config=wheel_common")
    tag = "cp" + ctx.var["PYTHON_VERSION"].replace(".", "")
    out = ctx.actions.declare_file("torch_tpu-0.2.0-%s-%s-manylinux_2_31_x86_64.whl" % (tag, tag))
    copies = []
    for file in ctx.files.srcs:
        copy = ctx.actions.declare_file("made/" + file.basename)
        ctx.actions.run_shell(
            inputs = [file],
            outputs = [copy],
            command = "cp %s %s" % (file.path, copy.path),
            mnemonic = "Copy",
        )
        copies.append(copy)
    ctx.actions.run_shell(
        inputs = copies + [ctx.file.packer],
        outputs = [out],
        command = "python3 %s %s %s" % (
            ctx.file.packer.path,
            out.path,
            " ".join([copy.path for copy in copies]),
        ),
        mnemonic = "Pack",
    )
    return [DefaultInfo(files = depset([out]))]

wheel = rule(
    implementation = _wheel,
    attrs = {
        "srcs": attr.label_list(allow_files = True),
        "packer": attr.label(allow_single_file = True),
        "_flag": attr.label(default = "//:wheel_build"),
    },
)
""",
    "ci/wheel/BUILD": """
load("//:defs.bzl", "wheel")
wheel(
    name = "torch_tpu_wheel",
    srcs = glob(["files/*"]),
    packer = "pack.py",
)
""",
    "ci/wheel/pack.py": '''
"""Pack files into a wheel: a name in base64 is the member's name."""

import base64
import hashlib
import sys
import time
import zipfile
from pathlib import Path

out, *paths = sys.argv[1:]
files = {base64.urlsafe_b64decode(Path(p).name).decode(): Path(p).read_bytes() for p in paths}
record = next(name for name in files if name.endswith("/METADATA")).replace("METADATA", "RECORD")
lines = []
with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
    for name, content in files.items():
        wheel.writestr(zipfile.ZipInfo(name, time.localtime()[:6]), content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{name},sha256={digest},{len(content)}")
    wheel.writestr(record, "\\n".join([*lines, f"{record},,", ""]))
''',
    ".bazelrc": """
build:wheel_common --//:wheel_build=True
build:wheel_common --remote_executor=grpc://127.0.0.1:1
build:wheel_common --remote_cache=grpc://127.0.0.1:1
build:no_rbe --remote_executor=
build:no_rbe --remote_cache=
""",
}

FOR_OLD_BAZEL = "build --experimental_inmemory_jdeps_files --experimental_inmemory_dotd_files\n"
"""What Bazel 2.1.0 wants beside --remote_download_outputs; newer ones have it so."""
FOR_NEW_BAZEL = "common --noenable_bzlmod\n"
"""Without it Bazel 7 asks a registry of modules that is not there."""


def make_workspace(folder: Path, bazelrc: str = "") -> int:
    """Write the workspace; its wheel passes the audit.

    Args:
        folder: Where; made if missing.
        bazelrc: More lines for ``.bazelrc``.

    Returns:
        How many actions the wheel takes.
    """
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip())
    with (folder / ".bazelrc").open("a") as file:
        file.write(bazelrc)
    content = torch_tpu_wheel().files
    (folder / "ci" / "wheel" / "files").mkdir()
    for name, data in content.items():
        label = base64.urlsafe_b64encode(name.encode()).decode()
        (folder / "ci" / "wheel" / "files" / label).write_bytes(data)
    return len(content) + 1


@dataclass
class Build:
    """What a run of the verb did.

    Attributes:
        sha256: Digest of the wheel.
        made_sha256: Digest of the wheel as Bazel made it.
        total: Bazel's actions, its own few included.
        cached: Those that came from a cache.
        remote: Those that a remote executor ran.
        statement: The statement beside the wheel.
        said: All that was shown.
    """

    sha256: str
    made_sha256: str
    total: int
    cached: int
    remote: int
    statement: dict[str, Any]
    said: str


def clean(checkout: Checkout) -> None:
    """Remove all that Bazel knows of the workspace; its own unpacked files may stay."""
    work = checkout.out / "bazel"
    for path in [work / "disk", *(work / "root").glob("*")]:
        if path.name != "install":
            subprocess.run(["chmod", "-R", "u+w", str(path)], check=False, capture_output=True)
            shutil.rmtree(path, ignore_errors=True)


_ACTIONS = re.compile(r"([\d,]+) actions: ([\d,]+) from caches(?:, ([\d,]+) on the remote)?")


def build(
    checkout: Checkout, bazel: Path, *more: str, env: Mapping[str, str] | None = None
) -> Build:
    """Build the wheel from a clean output root with the verb, as a person would."""
    clean(checkout)
    workspace = checkout.root / "workspace"
    done = checkout.run(*arguments(workspace, bazel), *more, module=MODULE, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    wheel = checkout.out / "wheels" / WHEEL
    record = json.loads((checkout.out / "results" / "build_wheel.json").read_text())
    one = record["data"]["wheels"][0]
    assert sha256(wheel) == one["sha256"]
    found = _ACTIONS.search(one["actions"])
    assert found is not None, one["actions"]
    total, cached, remote = (int((text or "0").replace(",", "")) for text in found.groups())
    told = json.loads(wheel.with_name(f"{WHEEL}.intoto.json").read_text())
    said = done.stdout + done.stderr + "\n".join(record["notes"])
    return Build(one["sha256"], one["made_sha256"], total, cached, remote, told, said)


@dataclass
class Cache:
    """An HTTP cache as Bazel wants it: PUT and GET below ``/ac`` and ``/cas``.

    Attributes:
        store: What was put, by path.
        status: A status that every request is answered with, instead of the real answer.
        left: After how many more requests it breaks off and answers no more; None for never.
        hits: Paths that were asked for and there.
        misses: Paths that were asked for and not there.
        puts: Paths that were put, in order.
        authorizations: The Authorization header of every request.
    """

    store: dict[str, bytes] = field(default_factory=dict)
    status: int = 0
    left: int | None = None
    hits: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    puts: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def actions(self, paths: list[str]) -> int:
        """How many of some paths are results of actions, and not contents."""
        return sum("/ac/" in path for path in paths)


@contextlib.contextmanager
def serve_cache() -> Iterator[Cache]:
    """Run a cache on a free port of the loopback."""
    cache = Cache()
    lock = threading.Lock()

    class Serves(Handler):
        def dead(self) -> bool:
            with lock:
                if cache.left is None:
                    return False
                cache.left -= 1
                self.close_connection = cache.left < 0
                return self.close_connection

        def do_GET(self) -> None:
            if self.dead():
                return
            with lock:
                cache.authorizations.append(self.headers.get("Authorization"))
                content = cache.store.get(self.path)
                if not cache.status:
                    (cache.misses if content is None else cache.hits).append(self.path)
            self.say(404 if content is None else 200, content or b"")

        def do_PUT(self) -> None:
            if self.dead():
                return
            content = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                cache.authorizations.append(self.headers.get("Authorization"))
                if not cache.status:
                    cache.store[self.path] = content
                    cache.puts.append(self.path)
            self.say(200, b"")

        def say(self, status: int, content: bytes) -> None:
            who = 'Basic realm="cache"' if cache.status == 401 else ""
            body = b"" if cache.status else content
            self.answer(cache.status or status, body, WWW_Authenticate=who)

    with serving(Serves) as port:
        cache.port = port
        yield cache

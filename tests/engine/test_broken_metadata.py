"""A metadata server that takes every question and answers none: nothing waits for it for long."""

from __future__ import annotations

import json
import time

from bake_support import Image

HOLE = """
import fcntl, socket, struct, subprocess, sys
# the address that every cloud VM's metadata server has, given to this container's own loopback
address = struct.pack("16sHH4s8x", b"lo:0", socket.AF_INET, 0, socket.inet_aton("169.254.169.254"))
with socket.socket() as control:
    fcntl.ioctl(control, 0x8916, address)
hole = socket.socket()
hole.bind(("169.254.169.254", 80))
hole.listen(64)
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
WAITS = """
import sys
sys.path.insert(0, "/opt/tpuforge")
from smoke import isolate, pjrt, xla
for quiet in ("1", None):
    env = {**pjrt.QUIET, "TPU_SKIP_MDS_QUERY": quiet}
    print(isolate.run(xla.read_arguments, timeout=8, env=env).kind)
"""
OPTIONS = (
    "--network=none",
    "--read-only",
    "--tmpfs=/tmp",
    "--user=0",
    "--cap-drop=ALL",
    "--cap-add=NET_ADMIN",
    "--cap-add=NET_BIND_SERVICE",
    "--add-host=metadata.google.internal:169.254.169.254",
)


def test_the_suite_does_not_wait_for_a_metadata_server_that_says_nothing(image: Image) -> None:
    chosen = "import.autoload or pair or import.flags or compile.small"
    words = ("health", "--json", "-", "--target", "v6e:2x2", "-k", chosen)
    started = time.monotonic()
    done = image.run("python", "-c", HOLE, *words, options=OPTIONS, timeout=300)
    seconds = time.monotonic() - started
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    status = {one["id"]: one["status"] for one in report["checks"]}
    assert status["import.autoload"] == status["import.pjrt-pair"] == "passed"
    assert seconds < 120
    assert all(one["seconds"] < 60 for one in report["checks"])


def test_without_the_suites_care_libtpu_would_wait(image: Image) -> None:
    # or the test above would prove nothing
    environ = ("--env=PYTHONPATH=/opt/tpuforge/site",)
    words = ("python", "-c", HOLE, "python", "-c", WAITS)
    done = image.run(*words, options=(*OPTIONS, *environ), timeout=120)
    assert done.stdout.splitlines()[-2:] == ["None", "timeout"], done.stdout + done.stderr

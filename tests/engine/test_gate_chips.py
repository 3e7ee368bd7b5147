"""The device tier on trees that look like hosts with TPUs: busy, broken, and with a simulated chip.

The suite of this checkout is laid over the image's, so that it is what is tested. Nothing here is a
TPU. A terminal that refuses to be opened twice plays the busy device file.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Image, result

HARDENED = ("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")
NUMBERS = {"v4": "0x005e", "v5e": "0x0063", "v5p": "0x0062", "v6e": "0x006f", "v7": "0x0076"}


def bus(folder: Path, generation: str, count: int) -> Path:
    """PCI devices of one generation."""
    for index in range(count):
        chip = folder / f"0000:00:{index:02x}.0"
        chip.mkdir(parents=True)
        for name, value in (("vendor", "0x1ae0"), ("device", NUMBERS[generation])):
            (chip / name).write_text(f"{value}\n")
        (chip / "class").write_text("0x120000\n")
        (chip / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{index}")
    return folder


def node(path: Path) -> Path:
    """A device file that can be opened, and is no device."""
    path.touch()
    path.chmod(0o666)
    return path


def mount(source: Path, target: str, *more: str) -> tuple[str, str]:
    return ("--mount", ",".join(("type=bind", f"source={source}", f"target={target}", *more)))


def device(
    image: Image, *options: str, words: tuple[str, ...] = (), before: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    """Run the device tier with such options of docker; exit code and report."""
    suite = mount(ROOT / "smoke", "/opt/tpuforge/smoke", "readonly")
    done: subprocess.CompletedProcess[str] = image.run(
        *(*before, "health", "--json", "-", "--tier", "device", *words),
        options=(*HARDENED, *suite, *options),
        timeout=600,
    )
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def check(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [one for one in report["checks"] if one["id"] == name]
    return dict(found)


@pytest.fixture
def busy_file() -> Iterator[Path]:
    """A device file whose second opening fails with EBUSY."""
    main, other = os.openpty()
    try:
        path = Path(os.ttyname(other))
        path.chmod(0o666)
        fcntl.ioctl(other, termios.TIOCEXCL)
        yield path
    finally:
        os.close(other)
        os.close(main)


def test_a_busy_tpu_is_told_from_a_broken_one(
    image: Image, busy_file: Path, tmp_path: Path
) -> None:
    pci = mount(bus(tmp_path / "pci", "v5e", 4), "/sys/bus/pci/devices", "readonly")
    free = [mount(node(tmp_path / f"{n}"), f"/dev/vfio/{n}") for n in (0, 1, 3)]
    code, report = device(
        image, *pci, *(word for pair in free for word in pair), *mount(busy_file, "/dev/vfio/2")
    )
    usable = check(report, "device.usable")
    assert (code, report["verdict"]) == (3, "device")
    assert usable["figures"]["state"] == "busy"
    assert "another process holds /dev/vfio/2" in usable["detail"]
    assert usable["seconds"] < 30
    assert check(report, "device.train")["detail"] == "the TPU is busy"
    assert check(report, "device.chips")["detail"] == "4 of TPU v5e"


REFUSES = """
import fcntl, http.server, socket, struct, subprocess, sys, threading
# the address that every cloud VM's metadata server has, given to this container's own loopback
address = struct.pack("16sHH4s8x", b"lo:0", socket.AF_INET, 0, socket.inet_aton("169.254.169.254"))
with socket.socket() as control:
    fcntl.ioctl(control, 0x8916, address)

class Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked for", self.path, file=sys.stderr)
        self.send_error(403)

server = http.server.ThreadingHTTPServer(("169.254.169.254", 80), Refuses)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
AS_METADATA_SERVER = ("--user=0", "--cap-add=NET_ADMIN", "--cap-add=NET_BIND_SERVICE")


def test_a_driver_that_is_none_ends_one_process_and_a_server_that_refuses_is_none(
    image: Image, tmp_path: Path
) -> None:
    pci = mount(bus(tmp_path / "pci", "v7", 3), "/sys/bus/pci/devices", "readonly")
    nodes = [mount(node(tmp_path / f"{n}"), f"/dev/vfio/{n}") for n in range(3)]
    options = (*pci, *(word for pair in nodes for word in pair), *AS_METADATA_SERVER)
    code, report = device(image, *options, before=("python", "-c", REFUSES))
    usable = check(report, "device.usable")
    assert (code, report["verdict"]) == (3, "device")
    assert usable["figures"]["state"] == "unusable"
    # libtpu would ask the server 30 times, a second apart, for each of its variables
    assert usable["seconds"] < 200
    assert usable["figures"]["env"]["TPU_SKIP_MDS_QUERY"] == "1"
    # a warning: it is the host's, and no image is unhealthy for it
    assert "3 chips of TPU v7" in check(report, "device.chips")["detail"]
    assert report["tiers"]["device"]["not_run"] == 7


def test_the_checks_pass_where_a_chip_works(image: Image, tmp_path: Path) -> None:
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    assert image.record
    code, report = device(
        image,
        *mount(folder, "/opt/simulator", "readonly"),
        *mount(folder / "pci", "/sys/bus/pci/devices", "readonly"),
        *mount(node(tmp_path / "7"), "/dev/vfio/7"),
        "--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",
        "--env=TF_CPP_MIN_LOG_LEVEL=3",
        words=("-k", "usable or chips or memory or launch or slice"),
    )
    assert code == 0, report["checks"]
    assert {one["id"]: one["status"] for one in report["checks"]} == {
        "device.usable": "passed",
        "device.chips": "passed",
        "device.memory": "not run",
        "device.launch": "passed",
        "device.slice": "not run",
    }
    assert "it says 0 bytes" in check(report, "device.memory")["detail"]
    assert check(report, "device.launch")["figures"]["world"] == 1
    assert "stands alone" in check(report, "device.slice")["detail"]


ONE_HOST = {
    "v4": (4, "2,2,1"),
    "v5p": (4, "2,2,1"),
    "v5e": (8, "2,4,1"),
    "v6e": (8, "2,4,1"),
    "v7": (8, "2,2,1,2"),
}
TWO_HOSTS = {"TPU_WORKER_HOSTNAMES": "a,b", "JOB_COMPLETION_INDEX": "1"}
LAUNCHES = """
import json, os, sys
sys.path.insert(0, "/opt/tpuforge")
import torch
from smoke import launch

for generation, count in json.loads(sys.argv[1]).items():
    for more in ({}, json.loads(sys.argv[2])):
        sys.stdout.flush()
        if os.fork() == 0:
            os.environ |= {"TPUFORGE_PCI_DEVICES": f"/hosts/{generation}", **more}
            print(json.dumps([generation, bool(more), launch.environment(count)]), flush=True)
            os._exit(0)
        os.wait()
"""


@pytest.fixture(scope="module")
def launched(
    image: Image, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, bool], dict[str, str]]:
    """What TorchTPU's launch sets: by generation, and whether it is one of two hosts.

    One process imports torch, and a fork of it is shown each host.
    """
    folder = tmp_path_factory.mktemp("hosts")
    simulator = Path(result("tpuforge.smoke.simulator")["folder"])
    for generation, (count, _) in ONE_HOST.items():
        bus(folder / generation, generation, count)
    words: list[str] = [*mount(folder, "/hosts", "readonly")]
    words += mount(simulator / "bus.so", "/bus.so", "readonly")
    words += mount(ROOT / "smoke", "/opt/tpuforge/smoke", "readonly")
    for index in range(8):
        words += mount(node(folder / str(index)), f"/dev/vfio/{index}")
    words += ["--env=LD_PRELOAD=/bus.so", "--env=TPUFORGE_PCI_DEVICES=/hosts/v6e"]
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    counts = json.dumps({generation: count for generation, (count, _) in ONE_HOST.items()})
    done = image.run(
        *("python", "-c", LAUNCHES, counts, json.dumps(TWO_HOSTS)),
        options=(*HARDENED, *words),
        timeout=300,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(said) == 2 * len(ONE_HOST), done.stdout + done.stderr
    return {(generation, two): found for generation, two, found in said}


@pytest.mark.parametrize("generation", ONE_HOST)
def test_the_launch_of_one_host(
    launched: dict[tuple[str, bool], dict[str, str]], generation: str
) -> None:
    count, topology = ONE_HOST[generation]
    found = launched[generation, False]
    assert found["TORCH_TPU_TOPOLOGY"] == topology
    addresses = found["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert len(set(addresses)) == count
    assert {address.partition(":")[0] for address in addresses} == {"localhost"}
    assert "NNODES" not in found


@pytest.mark.parametrize("generation", ONE_HOST)
def test_the_launch_of_two_hosts(
    launched: dict[tuple[str, bool], dict[str, str]], generation: str
) -> None:
    count, topology = ONE_HOST[generation]
    found = launched[generation, True]
    assert found["TORCH_TPU_TOPOLOGY"] == topology
    addresses = found["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    hosts = [address.partition(":")[0] for address in addresses]
    assert hosts == ["a"] * count + ["b"] * count
    assert (found["NNODES"], found["NODE_RANK"]) == ("2", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("a", "29500")


WAITS_FOR_OTHERS = """
import sys, json
sys.path.insert(0, "/opt/tpuforge")
from smoke import isolate, launch
print(json.dumps(isolate.run(launch.together, 5.0, timeout=240).error))
"""


def test_hosts_that_do_not_come_are_waited_for_and_named(image: Image, tmp_path: Path) -> None:
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    done = image.run(
        *("python", "-c", WAITS_FOR_OTHERS),
        options=(
            *HARDENED,
            *mount(ROOT / "smoke", "/opt/tpuforge/smoke", "readonly"),
            *mount(folder, "/opt/simulator", "readonly"),
            *mount(folder / "pci", "/sys/bus/pci/devices", "readonly"),
            *mount(node(tmp_path / "7"), "/dev/vfio/7"),
            "--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",
            "--env=TF_CPP_MIN_LOG_LEVEL=3",
            "--env=TPU_WORKER_HOSTNAMES=localhost,elsewhere",
            "--env=JOB_COMPLETION_INDEX=0",
        ),
        timeout=300,
    )
    said = json.loads(done.stdout)
    # by this word device.slice tells hosts that are not there from chips that do not work
    assert "DistStoreError" in said
    assert "1/2 clients joined" in said

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


def device(image: Image, *options: str, words: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """Run the device tier with such options of docker; exit code and report."""
    suite = mount(ROOT / "smoke", "/opt/tpuforge/smoke", "readonly")
    done: subprocess.CompletedProcess[str] = image.run(
        *("health", "--json", "-", "--tier", "device", *words),
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


def test_a_driver_that_is_none_ends_one_process_and_not_the_suite(
    image: Image, tmp_path: Path
) -> None:
    pci = mount(bus(tmp_path / "pci", "v7", 3), "/sys/bus/pci/devices", "readonly")
    nodes = [mount(node(tmp_path / f"{n}"), f"/dev/vfio/{n}") for n in range(3)]
    code, report = device(image, *pci, *(word for pair in nodes for word in pair))
    usable = check(report, "device.usable")
    assert (code, report["verdict"]) == (3, "device")
    assert usable["figures"]["state"] == "unusable"
    assert usable["seconds"] < 200
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
TWO_HOSTS = ("--env=TPU_WORKER_HOSTNAMES=a,b", "--env=JOB_COMPLETION_INDEX=1")
LAUNCH = """
import sys, json
sys.path.insert(0, "/opt/tpuforge")
from smoke import isolate, launch
ended = isolate.run(launch.environment, int(sys.argv[1]), timeout=240)
print(json.dumps({"value": ended.value, "error": ended.error}))
"""


def launched(image: Image, folder: Path, generation: str, *options: str) -> dict[str, str]:
    """What TorchTPU's launch sets on a host of that generation."""
    count = ONE_HOST[generation][0]
    words: list[str] = [*mount(bus(folder / "pci", generation, count), "/sys/bus/pci/devices")]
    words += mount(ROOT / "smoke", "/opt/tpuforge/smoke", "readonly")
    for index in range(count):
        words += mount(node(folder / str(index)), f"/dev/vfio/{index}")
    done = image.run(
        *("python", "-c", LAUNCH, str(count)), options=(*HARDENED, *words, *options), timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["error"] is None
    return dict(said["value"])


@pytest.mark.parametrize("generation", ["v4", "v5e", "v7"])
def test_the_launch_of_one_host(image: Image, tmp_path: Path, generation: str) -> None:
    count, topology = ONE_HOST[generation]
    found = launched(image, tmp_path, generation)
    assert found["TORCH_TPU_TOPOLOGY"] == topology
    addresses = found["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert len(set(addresses)) == count
    assert {address.partition(":")[0] for address in addresses} == {"localhost"}
    assert "NNODES" not in found


@pytest.mark.parametrize("generation", ["v5p", "v6e"])
def test_the_launch_of_two_hosts(image: Image, tmp_path: Path, generation: str) -> None:
    count, topology = ONE_HOST[generation]
    found = launched(image, tmp_path, generation, *TWO_HOSTS)
    assert found["TORCH_TPU_TOPOLOGY"] == topology
    addresses = found["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    hosts = [address.partition(":")[0] for address in addresses]
    assert hosts == ["a"] * count + ["b"] * count
    assert (found["NNODES"], found["NODE_RANK"]) == ("2", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("a", "29500")


def test_hosts_that_do_not_come_are_waited_for_and_named(image: Image, tmp_path: Path) -> None:
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    code = LAUNCH.replace("launch.environment, int(sys.argv[1])", "launch.together, 5.0")
    done = image.run(
        *("python", "-c", code),
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
    assert "DistStoreError" in said["error"]
    assert "1/2 clients joined" in said["error"]

"""TPU chips on a made-up PCI bus, and PJRT versions by the table."""

from __future__ import annotations

import errno
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from smoke import chips, pjrt
from smoke.workloads import expected_glue


def _chip(root: Path, device: str = "0x006f", vendor: str = "0x1ae0", address: str = "5") -> Path:
    folder = root / f"sys/bus/pci/devices/0000:00:0{address}.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")
    (folder / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{address}")
    return folder


def test_chips_are_found_and_other_devices_are_not(tmp_path: Path) -> None:
    _chip(tmp_path, "0x0063", address="6")
    _chip(tmp_path, address="5")
    _chip(tmp_path, vendor="0x8086", address="1")
    # a virtual machine's network card is Google's as well
    _chip(tmp_path, "0x0042", address="2")
    found = chips.scan(tmp_path)
    assert [(chip.address, chip.generation) for chip in found] == [
        ("0000:00:05.0", "v6e"),
        ("0000:00:06.0", "v5e"),
    ]
    assert found[0].node == tmp_path / "dev/vfio/5"


def test_no_bus_and_a_damaged_device_are_no_chips(tmp_path: Path) -> None:
    assert chips.scan(tmp_path) == []
    (_chip(tmp_path) / "vendor").write_bytes(b"\xff\xfe")
    assert chips.scan(tmp_path) == []


def test_a_chip_that_can_be_opened_is_free(tmp_path: Path) -> None:
    _chip(tmp_path)
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/5").touch()
    assert chips.state(chips.scan(tmp_path)).usable


def test_a_chip_without_its_device_file_is_unusable(tmp_path: Path) -> None:
    _chip(tmp_path)
    state = chips.state(chips.scan(tmp_path))
    assert (state.usable, state.what) == (False, "unusable")
    assert "--device" in state.why


@pytest.mark.parametrize(
    ("number", "what"), [(errno.EBUSY, "busy"), (errno.EACCES, "unusable"), (errno.EIO, "unusable")]
)
def test_busy_and_forbidden_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    _chip(tmp_path)
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/5").touch()
    found = chips.scan(tmp_path)

    def refuse(path: Any, flags: int) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", refuse)
    state = chips.state(found)
    assert (state.usable, state.what) == (False, what)


def test_without_a_metadata_server_the_chips_of_this_host_do(tmp_path: Path) -> None:
    _chip(tmp_path)
    found = chips.scan(tmp_path)
    env = chips.runtime_env(found, {"TPU_WORKER_ID": "3"}, metadata=False)
    assert env["TPU_SKIP_MDS_QUERY"] == "1"
    assert env["TPU_ACCELERATOR_TYPE"] == "v6e-1"
    assert "TPU_WORKER_ID" not in env
    assert chips.runtime_env(found, {}, metadata=True) == {}
    assert chips.runtime_env(found, {"TPU_SKIP_MDS_QUERY": "0"}, metadata=False) == {}


def test_known_pairs_work_and_strange_ones_do_not() -> None:
    assert pjrt.judge("0.116", "0.117").works
    assert "nobody has tried" in pjrt.judge("0.116", "0.200").why
    assert not pjrt.judge("0.116", "0.200").works
    assert not pjrt.judge("0.116", "1.0").works
    assert "major" in pjrt.judge("0.116", "1.0").why


def test_a_pair_that_is_known_to_fail_fails(tmp_path: Path) -> None:
    table = tmp_path / "pairs.toml"
    table.write_text(
        '[[pair]]\nframework = "0.1"\nplugin = "0.2"\nworks = false\nwhy = "it crashes"\n'
    )
    assert pjrt.judge("0.1", "0.2", table) == pjrt.Judgement(False, "it crashes")


def test_the_table_is_well_formed() -> None:
    pairs = tomllib.loads((pjrt.HERE / "pjrt_pairs.toml").read_text())["pair"]
    assert pairs
    names = [(pair["framework"], pair["plugin"]) for pair in pairs]
    assert len(set(names)) == len(names)
    for pair in pairs:
        assert set(pair) == {"framework", "plugin", "works", "why"}
        assert isinstance(pair["works"], bool)


def test_the_newest_glue_that_is_not_newer_than_torch() -> None:
    bundled = ["2_11_0", "2_12_0", "2_13_0", "2_14_0"]
    assert expected_glue("2.13.0+cpu", bundled) == "2_13_0"
    assert expected_glue("2.13.9", bundled) == "2_13_0"
    assert expected_glue("2.20.0", bundled) == "2_14_0"
    assert expected_glue("2.9.0", ["2_9_0", "2_10_0"]) == "2_9_0"
    with pytest.raises(AssertionError, match="no glue"):
        expected_glue("2.10.0", bundled)
    with pytest.raises(AssertionError, match="not a release"):
        expected_glue("main", bundled)

"""What ``tpu-run`` finds on a host, and the line it makes of it: on made-up hosts of every kind."""

from __future__ import annotations

import ast
import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from smoke import chips as suite

from tpu_vm_support import BUS, DIGEST, FOLDER, IMAGE, chip, host, node, process, program, put

tpu_run = program("tpu-run")
Host = tpu_run.Host
ID = "0123456789ab" + "c" * 52


def line(root: Path, *options: str, entrypoint: tuple[str, ...] = ("/usr/bin/tini",)) -> list[str]:
    """The words of ``docker run`` for a host."""
    words = ["--root", str(root), "--user", "1000:1000", "--shm-size", "16g", "--no-cache"]
    parsed = tpu_run.parse([*words, *options, IMAGE, "python", "train.py"])
    here = Host(root)
    found = tpu_run.find_chips(here)
    _, groups = tpu_run.check_access(here, found, parsed.user, parsed.group)
    image = tpu_run.Image(IMAGE, DIGEST, {"Config": {"Entrypoint": list(entrypoint)}})
    made: list[str] = tpu_run.run_words(here, found, groups, image, parsed)
    return made


def test_the_two_tables_of_chips_are_one() -> None:
    assert tpu_run.VENDOR == suite.VENDOR
    assert tpu_run.GENERATIONS == suite.GENERATIONS
    assert tpu_run.PER_HOST == suite.PER_HOST


@pytest.mark.parametrize("name", ["tpu-run", "gke-manifest"])
def test_a_program_stands_alone_on_the_oldest_python_of_a_tpu_vm(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text(encoding="utf-8"), feature_version=(3, 8))
    modules = {
        alias.name if isinstance(place, ast.Import) else place.module
        for place in ast.walk(tree)
        if isinstance(place, (ast.Import, ast.ImportFrom))
        for alias in place.names
    }
    assert {str(module).partition(".")[0] for module in modules} <= sys.stdlib_module_names
    # without it, "dict[str, int] | None" would be evaluated
    assert any(
        isinstance(place, ast.ImportFrom) and place.module == "__future__" for place in tree.body
    )


@pytest.mark.parametrize("generation", sorted(suite.PER_HOST))
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_host_is_found_and_given_its_chips_by_name(
    tmp_path: Path, generation: str, count: int
) -> None:
    root = host(tmp_path / "host", generation, count)
    found = tpu_run.find_chips(Host(root))
    assert [chip.generation for chip in found] == [generation] * count
    check = tpu_run.check_chips(found)
    assert check.status == ("ok" if count in suite.PER_HOST[generation] else "warning"), check
    assert check.found.startswith(f"{count} ")
    assert tpu_run.check_driver(Host(root), found).status == "ok"
    assert tpu_run.check_busy(Host(root), found).status == "ok"
    made = line(root)
    wanted = ["vfio", *map(str, range(count))]
    assert [word for word in made if word.startswith("--device")] == [
        f"--device={root}/dev/vfio/{name}:/dev/vfio/{name}" for name in wanted
    ]
    assert "--privileged" not in made
    assert {"--cap-drop=ALL", "--security-opt=no-new-privileges", "--net=host"} <= set(made)
    assert made[made.index("--ulimit") + 1] == "memlock=-1"
    assert "--shm-size=16g" in made
    assert made[-3:] == [IMAGE, "python", "train.py"]


def test_on_a_real_host_a_device_has_one_name() -> None:
    parsed = tpu_run.parse(["--user", "7", "--no-cache", "--shm-size", "16g", IMAGE, "true"])
    found = [tpu_run.Chip("0000:00:04.0", "v6e", "/dev/vfio/0")]
    made = tpu_run.run_words(Host(Path("/")), found, [], tpu_run.Image(IMAGE, DIGEST, None), parsed)
    assert made == [
        *("docker", "run", "--rm", "--net=host", "--ulimit", "memlock=-1", "--shm-size=16g"),
        *("--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *("--device=/dev/vfio/vfio", "--device=/dev/vfio/0", "--user=7:7", IMAGE, "true"),
    ]


@pytest.mark.parametrize("driver", ["accel", "accel-bare"])
def test_the_older_driver_needs_privileges_and_it_is_said(tmp_path: Path, driver: str) -> None:
    root = host(tmp_path / "host", "v4", 4, driver=driver)
    found = tpu_run.find_chips(Host(root))
    assert [chip.node for chip in found] == [f"/dev/accel{n}" for n in range(4)]
    check = tpu_run.check_driver(Host(root), found)
    assert check.status == "warning"
    assert "older driver" in check.found
    assert "VFIO" in check.remedy
    made = line(root)
    assert "--privileged" in made
    assert not [word for word in made if word.startswith(("--device", "--cap-drop"))]


def test_the_class_of_the_kernel_says_which_accelerator_is_which_chip(tmp_path: Path) -> None:
    root = host(tmp_path / "host", "v4", 2, driver="none")
    for index, address in enumerate(["0000:02:04.0", "0000:01:04.0"]):
        node(root, f"dev/accel{index}")
        (root / f"sys/class/accel/accel{index}").mkdir(parents=True)
        (root / f"sys/class/accel/accel{index}/device").symlink_to(f"../../../{address}")
    found = tpu_run.find_chips(Host(root))
    assert [(one.address, one.node) for one in found] == [
        ("0000:01:04.0", "/dev/accel1"),
        ("0000:02:04.0", "/dev/accel0"),
    ]


def test_devices_of_one_group_are_given_once(tmp_path: Path) -> None:
    root = host(tmp_path / "host", "v7", 0)
    for index in range(1, 5):
        chip(root, index, "v7", group=str((index - 1) // 2))
    for index in range(2):
        node(root, f"dev/vfio/{index}")
    assert "4 devices of TPU v7" in tpu_run.check_chips(tpu_run.find_chips(Host(root))).found
    assert sum("--device" in word for word in line(root)) == 3


@pytest.mark.parametrize(
    ("spoil", "code", "says", "mends"),
    [
        ("no chip", 2, "no TPU chip", "TPU VM"),
        ("no driver", 3, "no device file for 0000:01:04.0", "modprobe vfio-pci"),
        ("no group", 3, "no device file for 0000:01:04.0", "modprobe vfio-pci"),
        ("no vfio", 3, "/dev/vfio/vfio is not there", "modprobe vfio_iommu_type1"),
        ("mixed", 0, "TPU v4 and v6e", "one generation"),
    ],
)
def test_what_is_wrong_with_chips_is_said_with_its_remedy(
    tmp_path: Path, spoil: str, code: int, says: str, mends: str
) -> None:
    root = host(tmp_path / "host", count=0 if spoil == "no chip" else 1, driver="vfio")
    if spoil == "no driver":
        (root / BUS / "0000:01:04.0/iommu_group").unlink()
    elif spoil == "no group":
        (root / "dev/vfio/0").unlink()
    elif spoil == "no vfio":
        (root / "dev/vfio/vfio").unlink()
    elif spoil == "mixed":
        chip(root, 9, "v4", group="0")
    found = tpu_run.find_chips(Host(root))
    check = tpu_run.check_chips(found)
    if check.status == "ok":
        check = tpu_run.check_driver(Host(root), found)
    assert check.status == ("failed" if code else "warning")
    assert not code or check.code == code
    assert says in check.found
    assert mends in check.remedy


def test_who_holds_a_chip_is_named(tmp_path: Path) -> None:
    root = host(tmp_path / "host", count=4)
    found = tpu_run.find_chips(Host(root))
    process(root, 41, "/dev/null", "sleep 9")
    process(root, 42, "/dev/vfio/2", "python train.py --steps 9", ID)
    check = tpu_run.check_busy(Host(root), found)
    assert (check.status, check.code) == ("failed", 3)
    said = "process 42 (python train.py --steps 9) in container 0123456789ab"
    assert check.found == f"/dev/vfio/2 is held by {said}"
    assert check.figures == {"busy": ["/dev/vfio/2"]}
    assert "sudo" not in check.remedy.partition(";")[2]
    # a process of somebody else's, whose files cannot be seen
    put(root, "proc/43/fd", "not a folder")
    assert "sudo tpu-run --check" in tpu_run.check_busy(Host(root), found).remedy


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (errno.EBUSY, "failed", "/dev/vfio/1 is held by a process that is not shown"),
        (errno.ENODEV, "failed", "/dev/vfio/1 cannot be opened: No such device"),
        # "nobody holds it" would be a guess
        (errno.EACCES, "not run", "whether somebody holds /dev/vfio/1, only root can see"),
    ],
)
def test_a_chip_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, status: str, says: str
) -> None:
    root = host(tmp_path / "host", count=4)
    put(root, "proc/43/fd", "a process whose files cannot be seen")
    real = os.open

    def refuse(path: Any, *rest: Any) -> int:
        if str(path).endswith("/dev/vfio/1"):
            raise OSError(error, os.strerror(error))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    check = tpu_run.check_busy(Host(root), tpu_run.find_chips(Host(root)))
    assert (check.status, check.found) == (status, says)
    assert status != "failed" or check.code == 3
    assert check.remedy


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("runtime", "docker.io/runtime"),
        ("library/runtime", "docker.io/runtime"),
        ("index.docker.io/tpuforge/runtime", "docker.io/tpuforge/runtime"),
        ("localhost/runtime", "localhost/runtime"),
        ("host:5000/library/runtime", "host:5000/library/runtime"),
    ],
)
def test_docker_leaves_its_own_registry_out_of_names(name: str, full: str) -> None:
    assert tpu_run._full(name) == full


@pytest.mark.parametrize(
    ("mode", "owner", "group", "allowed", "groups"),
    [
        (0o666, 0, 0, True, []),
        (0o600, 0, 0, False, []),
        (0o600, 1000, 0, True, []),
        # the owner is refused by his own bits, whatever the others' say
        (0o066, 1000, 0, False, []),
        (0o660, 0, 1000, True, []),
        (0o660, 0, 108, True, [108]),
        (0o640, 0, 108, False, []),
        (0o660, 0, 0, False, []),
    ],
)
def test_the_users_rights_on_a_device_are_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    mode: int,
    owner: int,
    group: int,
    allowed: bool,
    groups: list[int],
) -> None:
    root = host(tmp_path / "host")
    real = Path.stat

    def owned(self: Path, **how: Any) -> Any:
        about = real(self, **how)
        if self.name != "0":
            return about
        return os.stat_result((0o100000 | mode, *about[1:4], owner, group, *about[6:]))

    monkeypatch.setattr(Path, "stat", owned)
    check, extra = tpu_run.check_access(Host(root), tpu_run.find_chips(Host(root)), 1000, 1000)
    assert check.status == ("ok" if allowed else "failed"), check
    assert extra == groups
    assert [word for word in line(root) if "group-add" in word] == [
        f"--group-add={one}" for one in groups
    ]
    if not allowed:
        assert check.code == 3
        assert f"/dev/vfio/0 (mode {mode:04o}, owner {owner}:{group})" in check.found
        assert "chmod a+rw /dev/vfio/vfio /dev/vfio/0" in check.remedy


def _limits(hard: str) -> str:
    return f"Max locked memory         {hard}      {hard}      bytes\n"


@pytest.mark.parametrize(
    ("hard", "bound", "rootless", "status", "says"),
    [
        ("67108864", "000001ffffffffff", False, "ok", "unlimited in the container (64.0 MiB"),
        ("67108864", "000001fffeffffff", False, "failed", "hard limit 64.0 MiB, and root"),
        ("67108864", "000001ffffffffff", True, "failed", "hard limit 64.0 MiB, and a rootless"),
        ("unlimited", "000001fffeffffff", True, "ok", "(unlimited out here)"),
    ],
)
def test_locked_memory(
    tmp_path: Path, *, hard: str, bound: str, rootless: bool, status: str, says: str
) -> None:
    root = host(tmp_path / "host")
    put(root, "proc/self/limits", _limits(hard))
    put(root, "proc/1/status", f"CapBnd:\t{bound}\n")
    check = tpu_run.check_memlock(Host(root), rootless)
    assert check.status == status
    assert says in check.found
    # root's Docker has no use for a limit of logins
    assert (status == "failed" and rootless) == ("limits.conf" in check.remedy)
    assert (status == "failed" and not rootless) == ("--cap-add SYS_RESOURCE" in check.remedy)
    assert check.figures["hard"] == (None if hard == "unlimited" else int(hard))


@pytest.mark.parametrize(
    ("gib", "status", "mends"), [(180, "ok", ""), (20, "warning", "10g"), (9, "failed", "4g")]
)
def test_shared_memory(tmp_path: Path, gib: int, status: str, mends: str) -> None:
    root = host(tmp_path / "host")
    put(root, "proc/meminfo", f"MemTotal: {gib << 20} kB\n")
    check = tpu_run.check_shm(Host(root), 16 << 30)
    assert check.status == status
    assert check.found == f"16.0 GiB for the container, of {gib}.0 GiB of memory"
    assert mends in check.remedy
    assert bool(mends) == bool(check.remedy)


def test_ipv6_on_the_loopback(tmp_path: Path) -> None:
    root = host(tmp_path / "host")
    assert tpu_run.check_ipv6(Host(root)).status == "ok"
    put(root, "proc/net/if_inet6", f"fe80{'0' * 27}1 02 40 20 80     ens8\n")
    check = tpu_run.check_ipv6(Host(root))
    assert check.status == "warning"
    assert "disable_ipv6=0" in check.remedy
    (root / "proc/net/if_inet6").unlink()
    # as where the kernel was started without IPv6; a made-up host just does not tell
    bare = Host(root)
    assert tpu_run.check_ipv6(bare).status == "not run"
    bare.real = True
    assert tpu_run.check_ipv6(bare).status == "warning"


def test_large_pages(tmp_path: Path) -> None:
    root = host(tmp_path / "host")
    assert tpu_run.check_hugepages(Host(root)).status == "ok"
    place = "sys/kernel/mm/transparent_hugepage/enabled"
    put(root, place, "always [madvise] never\n")
    check = tpu_run.check_hugepages(Host(root))
    assert (check.status, "madvise" in check.found) == ("warning", True)
    assert f"/{place}" in check.remedy
    (root / place).unlink()
    assert tpu_run.check_hugepages(Host(root)).status == "not run"


def test_the_lock_file_of_a_process_that_is_gone(tmp_path: Path) -> None:
    root = host(tmp_path / "host")
    assert tpu_run.check_lockfile(Host(root)).status == "ok"
    put(root, "tmp/libtpu_lockfile", "")
    dead = tpu_run.check_lockfile(Host(root))
    assert dead.status == "warning"
    assert "a process that is gone" in dead.found
    assert "sudo rm /tmp/libtpu_lockfile" in dead.remedy
    process(root, 77, "/tmp/libtpu_lockfile", "python other.py")
    alive = tpu_run.check_lockfile(Host(root))
    assert "process 77 (python other.py)" in alive.found
    assert "rm" not in alive.remedy.split()


def test_free_disk(tmp_path: Path) -> None:
    check = tpu_run.check_disk(tmp_path / "not" / "there", 1, "a file")
    assert check.status == "ok"
    assert check.figures["path"] == str(tmp_path)
    short = tpu_run.check_disk(tmp_path, 1 << 60, "an image")
    assert (short.status, short.code) == ("failed", 1)
    assert f"{1 << 30}.0 GiB needed for an image" in short.found
    assert "docker system prune" in short.remedy


@pytest.mark.parametrize(
    ("text", "name", "tag", "digest"),
    [
        (IMAGE, "registry.invalid:5000/tpuforge/runtime", "", DIGEST),
        (f"runtime:0.2@{DIGEST}", "runtime", "0.2", DIGEST),
        (f"[::1]:5000/runtime@{DIGEST}", "[::1]:5000/runtime", "", DIGEST),
        (
            "tpuforge/runtime:0.2.0-torch2.13.0-py311",
            "tpuforge/runtime",
            "0.2.0-torch2.13.0-py311",
            "",
        ),
        (DIGEST, "", "", DIGEST),
    ],
)
def test_names_of_images(text: str, name: str, tag: str, digest: str) -> None:
    assert tpu_run.parse_reference(text) == (name, tag, digest)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "UPPER",
        f"runtime@{DIGEST[:-1]}",
        f"runtime@{DIGEST.upper()}",
        "a b",
        "-v",
        "runtime:",
        "a//b",
        f"localhost:65536/runtime@{DIGEST}",
        f"localhost:0/runtime@{DIGEST}",
        f"localhost:{'9' * 5000}/runtime@{DIGEST}",
        f"{'x' * 5000}@{DIGEST}",
        f"me:open-sesame@registry.invalid/runtime@{DIGEST}",
        "https://me:open-sesame@registry.invalid/runtime",
        f"me:open/sesame@registry.invalid/runtime@{DIGEST}1",
    ],
)
def test_what_is_no_name_of_an_image(text: str) -> None:
    with pytest.raises(tpu_run.StopError) as caught:
        tpu_run.parse_reference(text)
    assert caught.value.code == 2
    assert "sesame" not in caught.value.found
    assert len(caught.value.found) < 400


@pytest.mark.parametrize(
    ("options", "there"),
    [
        (["--read-only"], ["--read-only", "--tmpfs=/tmp"]),
        (["--name", "job"], ["--name", "job"]),
        (["-e", "A=b c", "-v", "/data:/data:ro"], ["--volume=/data:/data:ro", "--env=A=b c"]),
        (["--docker-option=--cpus=8"], ["--cpus=8"]),
        (["--privileged"], ["--privileged"]),
        (["--docker", "podman"], ["podman"]),
    ],
)
def test_options_of_the_line(tmp_path: Path, options: list[str], there: list[str]) -> None:
    made = line(host(tmp_path / "host"), *options)
    assert [word for word in made if word in there] == there
    # a container with all rights needs no single device
    assert ("--privileged" in there) != any(word.startswith("--device") for word in made)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: terminal, raising=False)
    assert ("-it" in line(host(tmp_path / "host"))) == terminal


def test_only_an_image_without_an_init_gets_one(tmp_path: Path) -> None:
    root = host(tmp_path / "host")
    assert "--init" not in line(root)
    assert "--init" in line(root, entrypoint=())
    assert "--init" in line(root, entrypoint=("/bin/sh", "-c"))


@pytest.mark.parametrize(
    ("uid", "sudo", "user"),
    [(1234, "", (1234, 5678)), (0, "", (1000, 1000)), (0, "4321", (4321, 4321))],
)
def test_the_container_runs_as_who_called(
    monkeypatch: pytest.MonkeyPatch, uid: int, sudo: str, user: tuple[int, int]
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(os, "getgid", lambda: 5678 if uid else 0)
    monkeypatch.setenv("SUDO_UID", sudo)
    monkeypatch.setenv("SUDO_GID", sudo)
    parsed = tpu_run.parse(["--check"])
    assert (parsed.user, parsed.group) == user
    assert (str(user[0]) == parsed.cache.name) == (uid == 0)


def test_the_cache_belongs_to_the_user_of_the_container(tmp_path: Path) -> None:
    user, group = os.getuid(), os.getgid()
    check = tpu_run.make_cache(tmp_path / "a" / "b", user, group)
    assert check.status == "ok"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    other = tpu_run.make_cache(tmp_path / "a" / "b", user + 1, group + 1)
    assert other.status == "warning"
    assert f"chown {user + 1}:{group + 1}" in other.remedy
    (tmp_path / "file").touch()
    blocked = tpu_run.make_cache(tmp_path / "file" / "c", user, group)
    assert blocked.status == "warning"
    assert "compiled again" in blocked.found


def test_the_page_knows_every_option_and_every_check() -> None:
    page = (FOLDER.parents[1] / "docs" / "tpu-vm.md").read_text(encoding="utf-8")
    code = (FOLDER / "tpu-run").read_text(encoding="utf-8")
    options = set(re.findall(r'"(--[a-z-]+)"', code)) - {
        # those of docker and cosign
        *("--rm", "--init", "--quiet", "--format", "--ulimit"),
        *("--certificate-identity", "--certificate-oidc-issuer"),
    }
    assert len(options) > 20
    assert {option for option in options if not re.search(rf"{option}[`\\ ,]", page)} == set()
    checks = set(re.findall(r'Check\(\s*"([a-z0-9]+)"', code))
    assert checks == set(tpu_run.CHECKS)
    assert {check for check in checks if f"| `{check}` |" not in page} == set()

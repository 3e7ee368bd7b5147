"""What ``tpu-run`` refuses and survives, as its user sees it: messages, exit codes, what was run.

Docker and cosign are stand-ins that note what they are asked; the host is a made-up one.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from process_support import call
from tpu_vm_support import DIGEST, FOLDER, IMAGE, Clients, found, host, process, program, put, run

NAME = IMAGE.partition("@")[0]
UNSAID = "THE SIGNATURE WAS NOT VERIFIED"
KEY = ("--key", "cosign.pub")
KEYLESS = ("--identity", "who@example.org", "--issuer", "https://issuer.example.org")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with four chips."""
    return host(tmp_path / "host", "v5p", 4)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """The folder for the stand-ins."""
    yield tmp_path / "clients"
    shutil.rmtree(tmp_path / "clients", ignore_errors=True)


def test_it_pulls_by_digest_and_becomes_the_container(root: Path, quick: Path) -> None:
    clients = Clients(quick, code=7)
    done = run(
        "--cache", str(root / "cache"), IMAGE, "python", "-c", "1", root=root, clients=clients
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == "in the container\n"
    pull, line = clients.asked
    assert pull == f"pull --quiet {IMAGE}"
    assert line.startswith("run --rm --net=host --ulimit memlock=-1 --shm-size=16g --cap-drop=ALL")
    assert line.endswith(f"--volume={root}/cache:/cache {IMAGE} python -c 1")
    assert (root / "cache").is_dir()
    assert UNSAID in done.stderr
    again = run("--no-cache", IMAGE, "true", root=root, clients=clients)
    assert again.returncode == 7
    # it is there by now
    assert [line.partition(" ")[0] for line in clients.asked] == ["pull", "run", "run"]


def test_a_dry_run_prints_one_line_and_does_nothing(root: Path, quick: Path) -> None:
    clients = Clients(quick)
    done = run("--dry-run", "--cache", str(root / "c"), IMAGE, "a b", root=root, clients=clients)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert done.stdout.endswith(f" {IMAGE} 'a b'\n")
    assert done.stdout.startswith("docker run --rm --net=host ")
    assert clients.asked == []
    assert not (root / "c").exists()


def test_the_json_has_all_of_it(root: Path, quick: Path) -> None:
    done = run("--dry-run", "--json", "-", IMAGE, root=root, clients=Clients(quick))
    document = json.loads(done.stdout)
    assert document["schema"] == "tpuforge.tpu-run/1"
    assert document["exit_code"] == 0
    assert document["error"] is None
    assert document["chips"][3] == {
        "address": "0000:04:04.0",
        "generation": "v5p",
        "node": "/dev/vfio/3",
    }
    assert document["image"] == {"run": IMAGE, "digest": DIGEST}
    assert document["line"].split()[-1] == document["command"][-1] == IMAGE
    checks = {check["id"]: check for check in document["checks"]}
    wanted = "chips driver busy access shm ipv6 hugepages lockfile docker memlock disk signature"
    assert list(checks) == wanted.split()
    assert checks["signature"]["status"] == "warning"
    assert {check["status"] for name, check in checks.items() if name != "signature"} == {"ok"}
    # in a file as well, whole or not at all
    clients = Clients(quick.with_name("others"), here=True, code=5)
    path = root / "found.json"
    done = run("--no-cache", "--json", str(path), IMAGE, root=root, clients=clients)
    assert done.returncode == 5
    assert json.loads(path.read_text())["command"][-1] == IMAGE
    assert not [one.name for one in root.iterdir() if one.name.startswith("tmp")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "either an IMAGE or --check"),
        (("--check", IMAGE), "either an IMAGE or --check"),
        (("--json", "-", IMAGE), "a container writes there too"),
        (("--identity", "me", IMAGE), "--identity and --issuer belong together"),
        ((*KEY, *KEYLESS, IMAGE), "either --key or --identity"),
        (("--shm-size", "many", IMAGE), "'many' is not a size such as 16g"),
        (("--user", "tpu", IMAGE), "'tpu' is not a user such as 1000:1000"),
        (("--docke", "x", IMAGE), "unrecognized arguments"),
        # a variable that is not set must not become an image that is not verified
        (("--key", "", IMAGE), "argument --key: it is empty"),
        (("--identity", " ", "--issuer", "x", IMAGE), "argument --identity: it is empty"),
        (("--cache", "", IMAGE), "argument --cache: it is empty"),
        (("--cache", "/etc/passwd", IMAGE), "--cache /etc/passwd is not a folder"),
        (("--shm-size", "1023k", IMAGE), "is not a size such as 16g"),
        (("--name=-x", IMAGE), "'-x' is not the name of a container"),
        (("--docker-option", "", IMAGE), "argument --docker-option: it is empty"),
        (("-e", "", IMAGE), "argument -e/--env: it is empty"),
        (("--cache", "/data:ro", IMAGE), "has a colon, which docker run cannot mount"),
        (("--shm-size", "9" * 5000, IMAGE), "is not a size such as 16g"),
        (("--user", "4294967296", IMAGE), "is not a user such as 1000:1000"),
        (("--ignore", "memlok", IMAGE), "invalid choice: 'memlok'"),
        ((f"{NAME}:0.2",), "is a tag, which anybody who may push can move"),
        ((NAME,), "is a tag, which anybody who may push can move"),
        (("Runtime@sha256:1",), "is not the name of an image"),
        (("--check", "--docker", "no-such-docker"), "there is no no-such-docker on PATH"),
        (("--cosign", "no-such-cosign", *KEY, IMAGE), "there is no no-such-cosign on PATH"),
    ],
)
def test_what_makes_no_sense_or_is_missing_is_2(
    root: Path, quick: Path, words: tuple[str, ...], says: str
) -> None:
    clients = Clients(quick)
    done = run(*words, root=root, clients=clients)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "\n  mend: " in done.stderr
    assert clients.asked == []


@pytest.mark.parametrize(
    ("spoil", "code", "check"),
    [
        ("nothing", 0, ""),
        ("busy", 3, "busy"),
        ("shm", 1, "shm"),
        ("rootless", 1, "memlock"),
        ("both", 1, "shm"),
        ("chips", 2, "chips"),
    ],
)
def test_a_host_that_is_not_fit_runs_nothing(
    root: Path, quick: Path, *, spoil: str, code: int, check: str
) -> None:
    clients = Clients(quick, rootless=spoil == "rootless")
    if spoil in ("busy", "both"):
        process(root, 9, "/dev/vfio/1", "python old.py")
    if spoil in ("shm", "both"):
        put(root, "proc/meminfo", "MemTotal: 8388608 kB\n")
    if spoil == "chips":
        shutil.rmtree(root / "sys/bus/pci/devices")
    words = ("--shm-size", "16g", "--no-cache", IMAGE, "true")
    done = run(*words, root=root, clients=clients)
    assert done.returncode == code, done.stderr
    assert [line.partition(" ")[0] for line in clients.asked] == ([] if code else ["pull", "run"])
    looked = run("--check", "--json", "-", "--shm-size", "16g", root=root, clients=clients)
    assert looked.returncode == code
    failed = [name for name, one in found(looked).items() if one["status"] == "failed"]
    assert (check in failed) == bool(check)
    assert len(failed) == {"nothing": 0, "both": 2}.get(spoil, 1)
    if spoil == "shm":
        let = run("--ignore", "shm", *words, root=root, clients=clients)
        assert let.returncode == 0, let.stderr
        assert "(ignored)" in let.stderr
    if spoil == "rootless":
        let = run("--ignore", "memlock", *words, root=root, clients=clients)
        assert let.returncode == 0
        assert "memlock" not in clients.asked[-1]


def test_a_tag_runs_by_the_digest_that_it_has_just_now(root: Path, quick: Path) -> None:
    clients = Clients(quick)
    words = ("--allow-tag", "--no-cache", f"{NAME}:0.2", "true")
    done = run(*words, root=root, clients=clients)
    assert done.returncode == 0, done.stderr
    assert f"{NAME}:0.2 is {IMAGE}" in done.stderr
    pull, line = clients.asked
    assert pull == f"pull --quiet {NAME}:0.2"
    assert line.endswith(f"{IMAGE} true")
    never = Clients(quick.with_name("others"))
    done = run("--pull", "never", *words, root=root, clients=never)
    assert (done.returncode, never.asked) == (2, [])


def test_a_dry_run_without_docker_says_what_the_line_would_be(root: Path, quick: Path) -> None:
    words = ("--dry-run", "--no-cache", "--docker", "no-such-docker", IMAGE, "true")
    done = run(*words, root=root, clients=Clients(quick))
    assert done.returncode == 2
    assert "there is no no-such-docker on PATH" in done.stderr
    assert done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("  no-such-docker run --rm --net=host")
    assert line.endswith(f"{IMAGE} true")


def test_a_failed_check_leaves_no_line_and_is_said_at_the_end(root: Path, quick: Path) -> None:
    clients = Clients(quick, rootless=True)
    words = ("--no-cache", IMAGE, "true")
    dry = run("--dry-run", *words, root=root, clients=clients)
    assert (dry.returncode, dry.stdout) == (1, "")
    assert "tpu-run: would not be run because of memlock: hard limit 64.0 MiB" in dry.stderr
    assert "or --ignore memlock\n" in dry.stderr
    assert " --ulimit memlock=-1 " in dry.stderr.splitlines()[-1]
    document = json.loads(
        run("--dry-run", "--json", "-", *words, root=root, clients=clients).stdout
    )
    assert (document["exit_code"], document["line"], document["command"]) == (1, "", [])
    let = run("--dry-run", "--ignore", "memlock", *words, root=root, clients=clients)
    assert let.returncode == 0, let.stderr
    assert "memlock" not in let.stdout
    assert let.stdout.startswith("docker run --rm --net=host --shm-size=16g ")
    real = run(*words, root=root, clients=clients)
    assert (real.returncode, real.stdout) == (1, "")
    assert "tpu-run: not run because of memlock: hard limit 64.0 MiB" in real.stderr
    assert real.stderr.splitlines()[-1] == "  mend: see above; or --ignore memlock"
    # a look at the host runs nothing in any case
    assert "because of" not in run("--check", root=root, clients=clients).stderr
    assert clients.asked == []


def test_the_folder_of_the_page_is_a_host(tmp_path: Path, quick: Path) -> None:
    page = (FOLDER.parents[1] / "docs" / "tpu-vm.md").read_text(encoding="utf-8")
    recipe = page.partition("### Without a TPU")[2].partition("    images/tpu-vm/tpu-run --root")[0]
    lines = [line.strip() for line in recipe.splitlines() if line.startswith("    ")]
    assert len(lines) == 3
    made = ["/bin/sh", "-euc", "\n".join(lines)]
    subprocess.run(made, cwd=tmp_path, check=True, timeout=60)
    done = run("--dry-run", "--no-cache", IMAGE, root=tmp_path / "host", clients=Clients(quick))
    assert done.returncode == 0, done.stderr
    assert "1 chip of TPU v6e" in done.stderr
    assert f"--device={tmp_path}/host/dev/vfio/0:/dev/vfio/0" in done.stdout


def test_an_engine_that_gives_another_digest_is_not_believed(root: Path, quick: Path) -> None:
    other = f"sha256:{'e' * 64}"
    clients = Clients(quick, digest=other)
    done = run("--no-cache", IMAGE, root=root, clients=clients)
    assert done.returncode == 1
    assert f"the engine gave {other} for {IMAGE}" in done.stderr
    assert [line.partition(" ")[0] for line in clients.asked] == ["pull"]


@pytest.mark.parametrize("who", [KEY, KEYLESS])
def test_a_signature_is_verified_before_a_byte_is_pulled(
    root: Path, quick: Path, who: tuple[str, ...]
) -> None:
    clients = Clients(quick, signed=True)
    done = run(*who, "--no-cache", IMAGE, "true", root=root, clients=clients)
    assert done.returncode == 0, done.stderr
    assert UNSAID not in done.stderr
    verify, pull, _ = clients.asked
    wanted = " ".join(who).replace("--i", "--certificate-i").replace("te-issuer", "te-oidc-issuer")
    wanted += " --insecure-ignore-tlog=true" if who == KEY else ""
    assert verify == f"cosign verify {wanted} {IMAGE}"
    assert pull.startswith("pull ")


@pytest.mark.parametrize("words", [(*KEY, IMAGE), (*KEY, "--dry-run", IMAGE), (*KEYLESS, IMAGE)])
def test_an_image_that_is_not_signed_by_them_is_not_run(
    root: Path, quick: Path, words: tuple[str, ...]
) -> None:
    clients = Clients(quick, here=True, signed=False)
    done = run("--no-cache", *words, root=root, clients=clients)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "is not signed by" in done.stderr
    assert "no matching signatures" in done.stderr
    assert [line.split()[:2] for line in clients.asked] == [["cosign", "verify"]]


def test_a_registry_that_does_not_answer_says_nothing_about_a_signature(
    root: Path, quick: Path
) -> None:
    clients = Clients(quick, here=True, signed=False, refuses="Error: connect: connection refused")
    done = run(*KEY, "--no-cache", IMAGE, root=root, clients=clients)
    assert done.returncode == 2
    assert "cannot be found out" in done.stderr
    assert "connection refused" in done.stderr
    assert [line.split()[0] for line in clients.asked] == ["cosign"]


def test_a_signature_cannot_be_asked_of_a_bare_id(root: Path, quick: Path) -> None:
    clients = Clients(quick, here=True, signed=True)
    done = run(*KEY, "--no-cache", DIGEST, root=root, clients=clients)
    assert done.returncode == 1
    assert "no name in a registry" in done.stderr
    assert clients.asked == []
    done = run("--no-cache", DIGEST, root=root, clients=clients)
    assert done.returncode == 0, done.stderr
    assert UNSAID in done.stderr


@pytest.mark.parametrize(
    ("fails", "code", "pulls"),
    [
        (("read: connection reset by peer",) * 2, 0, 3),
        (("received unexpected HTTP status: 500",) * 9, 2, 4),
        (("manifest unknown",) * 9, 2, 1),
        (("pull access denied, repository does not exist",) * 9, 2, 1),
    ],
)
def test_a_pull_is_tried_again_where_that_can_help(
    root: Path,
    quick: Path,
    *,
    fails: tuple[str, ...],
    code: int,
    pulls: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clients = Clients(quick, pull_fails=fails)
    monkeypatch.setenv("PATH", clients.path)
    tpu_run = program("tpu-run")
    monkeypatch.setattr(tpu_run, "PULL_PAUSE_S", 0.01)
    docker = tpu_run.Docker("docker")
    if code:
        with pytest.raises(tpu_run.StopError) as caught:
            docker.pull(IMAGE)
        assert caught.value.code == code
        assert fails[0] in caught.value.found
    else:
        docker.pull(IMAGE)
    assert len(clients.asked) == pulls


def test_a_cache_that_cannot_be_had_is_said_and_not_fatal(root: Path, quick: Path) -> None:
    clients = Clients(quick, here=True)
    (root / "file").touch()
    done = run("--cache", str(root / "file" / "below"), IMAGE, "true", root=root, clients=clients)
    assert done.returncode == 0, done.stderr
    assert "compiled again in each run" in done.stderr
    assert "/cache" not in clients.asked[-1]


def test_a_result_that_cannot_be_written_is_2(root: Path, quick: Path) -> None:
    clients = Clients(quick, here=True)
    # what is no file stays what it is
    (root / "nothing").symlink_to("/dev/null")
    assert (
        run("--check", "--json", str(root / "nothing"), root=root, clients=clients).returncode == 0
    )
    assert (root / "nothing").is_symlink() and not (root / "nothing.part").exists()
    done = run("--json", str(root / "no" / "where"), IMAGE, root=root, clients=clients)
    assert done.returncode == 2
    assert "No such file or directory" in done.stderr
    assert clients.asked == []


@pytest.mark.parametrize(
    ("output", "code"), [("| true", 0), (">&-", 0), ("2>&-", 0), (">/dev/full", 2)]
)
@pytest.mark.parametrize("what", [("--dry-run",), ("--dry-run", "--json", "-")])
def test_where_the_line_goes_changes_nothing(
    root: Path, quick: Path, *, output: str, code: int, what: tuple[str, ...]
) -> None:
    clients = Clients(quick, here=True)
    words = [sys.executable, "-B", str(FOLDER / "tpu-run"), "--root", str(root), *what, IMAGE]
    done = call(
        ["bash", "-c", f"set -o pipefail; {shlex.join(words)} {output}"],
        env={"PATH": clients.path},
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("No space left on device" in done.stderr) == (code == 2)


def _dead(python: str) -> bool:
    """Whether this is the shim of a Python that is not chosen, which only says so."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode != 0


def test_older_pythons_of_this_machine_run_it(root: Path, quick: Path) -> None:
    clients = Clients(quick, here=True)
    others = [shutil.which(f"python3.{minor}") for minor in (8, 10)]
    for python in [sys.executable, *others]:
        if not python or _dead(python):
            continue
        done = run("--dry-run", IMAGE, root=root, clients=clients, python=python)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("docker run ")

"""``build_wheel`` where it cannot work: message and exit code, as a person sees them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from build_support import Checkout, free_port, make_checkout
from tpuforge.build.checkout import TARGET

MODULE = "tpuforge.build.source"
ON_HOST = ("--where", "host")
RC = """
build:wheel_common --//:wheel_build=True
build:wheel_common --remote_executor=grpc://127.0.0.1:1
build:no_rbe --remote_executor=
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return make_checkout(tmp_path_factory.mktemp("refusals") / "forge家")


def workspace(folder: Path, rc: str = RC) -> Path:
    """A folder that looks like a checkout of TorchTPU."""
    (folder / "ci" / "wheel").mkdir(parents=True)
    (folder / "ci" / "wheel" / "BUILD").touch()
    (folder / "MODULE.bazel").touch()
    (folder / ".bazelversion").write_text("7.7.1\n")
    (folder / ".bazelrc").write_text(rc)
    return folder


def repository(folder: Path) -> Path:
    """The same as a git repository with the tag v0.2.0."""
    workspace(folder)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"], ["tag", "v0.2.0"]):
        subprocess.run([*git, *words], check=True)
    return folder


def test_an_upstream_that_does_not_answer(checkout: Checkout) -> None:
    nowhere = f"https://127.0.0.1:{free_port()}/x"
    done = checkout.run("--repository", nowhere, module=MODULE)
    assert done.returncode == 2
    assert "this machine lacks what the build needs: network: no answer from" in done.stderr
    assert "expected: 1 host, for the source" in done.stderr
    assert "a checkout of your own needs no fetching: --source DIR" in done.stderr
    record = json.loads((checkout.out / "results" / "build_wheel.json").read_text())
    assert (record["status"], record["exit_code"]) == ("failed", 2)


def test_an_unknown_ref(checkout: Checkout, tmp_path: Path) -> None:
    upstream = str(repository(tmp_path / "upstream"))
    done = checkout.run("--ref", "v0.2.1", "--repository", upstream, module=MODULE)
    assert done.returncode == 2
    assert f"{upstream} has no tag or branch v0.2.1" in done.stderr
    assert "near are v0.2.0" in done.stderr
    done = checkout.run("--ref", "f" * 40, "--repository", upstream, module=MODULE)
    assert done.returncode == 2
    assert f"{upstream} has no commit {'f' * 40}" in done.stderr
    assert list((checkout.out / "bazel" / "sources").iterdir()) == []


def test_a_source_that_is_none(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.run("--source", str(tmp_path / "gone"), module=MODULE)
    assert done.returncode == 2
    assert f"{tmp_path / 'gone'}: no such folder" in done.stderr
    done = checkout.run("--source", str(tmp_path), module=MODULE)
    assert done.returncode == 2
    assert f"{tmp_path} is not a checkout of TorchTPU" in done.stderr
    assert f"with the target {TARGET}" in done.stderr


def test_a_dirty_source(checkout: Checkout, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    (source / "MODULE.bazel").write_text("changed")
    done = checkout.run("--source", str(source), module=MODULE)
    assert done.returncode == 2
    assert f"{source} differs from its commit:  M MODULE.bazel" in done.stderr
    assert "build with them: --allow-dirty" in done.stderr


@pytest.mark.parametrize(
    ("rc", "said"),
    [
        ("", "cannot be read"),
        (RC.replace("wheel_common", "wheel-common"), "defines no configuration wheel_common"),
        (RC.replace("--//:wheel_build=True", ""), "does not set --//:wheel_build=True"),
        (RC.replace("build:no_rbe --remote_executor=", "build:no_rbe"), "no_rbe does not clear it"),
    ],
)
def test_settings_that_cannot_work(checkout: Checkout, tmp_path: Path, rc: str, said: str) -> None:
    source = workspace(tmp_path / "source", rc)
    if not rc:
        (source / ".bazelrc").unlink()
    done = checkout.run("--source", str(source), module=MODULE)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (checkout.out / "bazel" / "root").exists()


def test_an_unsupported_python(checkout: Checkout) -> None:
    done = checkout.run("--python", "3.10", module=MODULE)
    assert done.returncode == 2
    assert "Python 3.10 is not supported" in done.stderr


def test_no_bazelisk_and_no_npm(checkout: Checkout, tmp_path: Path) -> None:
    source = workspace(tmp_path / "source")
    pins = checkout.root / "lock" / "pins.toml"
    text = pins.read_text()
    pins.write_text(text.replace('release = "https://github.com', 'release = "https://127.0.0.1:1'))
    done = checkout.run(
        "--source", str(source), *ON_HOST, module=MODULE, env={"PATH": str(tmp_path)}
    )
    pins.write_text(text)
    assert done.returncode == 2
    assert "there is no Bazelisk, and it cannot be had: npm is not installed; " in done.stderr
    assert "./forge build_wheel --bazelisk PATH" in done.stderr


def test_a_remote_that_does_not_answer(checkout: Checkout, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}/x"
    rc = f"{RC}build:public_caching_readonly --remote_cache={nowhere}\n"
    source = workspace(tmp_path / "source", rc)
    for remote, name in (
        (f"cache={nowhere}", "the remote cache"),
        (f"executor={nowhere.replace('http', 'grpc')}", "the remote executor"),
        ("public-cache", "upstream's public cache"),
    ):
        done = checkout.run("--source", str(source), "--remote", remote, module=MODULE)
        assert done.returncode == 2
        assert "network: no answer from 127.0.0.1 (Connection refused)" in done.stderr
        assert f"expected: 1 host, for {name}" in done.stderr


def test_credentials_that_are_not_there(checkout: Checkout, tmp_path: Path) -> None:
    source = workspace(tmp_path / "source")
    remote = ["--remote", "executor=grpc://127.0.0.1:1", "--credentials", "/no/key.json"]
    done = checkout.run("--source", str(source), *remote, module=MODULE)
    assert done.returncode == 2
    assert "no answer from 127.0.0.1 (Connection refused)" in done.stderr
    assert "credentials: /no/key.json cannot be read" in done.stderr
    assert "gcloud auth application-default login" in done.stderr


def test_a_bazelisk_that_has_no_bazel(checkout: Checkout, tmp_path: Path) -> None:
    source = workspace(tmp_path / "source")
    for program in ("/bin/true", "/bin/false"):
        native = str(Path(program).resolve())
        done = checkout.run("--source", str(source), *ON_HOST, "--bazelisk", native, module=MODULE)
        assert done.returncode == 2
        assert "there is no Bazel 7.7.1: exit code" in done.stderr
    assert not (checkout.out / "wheels").exists()

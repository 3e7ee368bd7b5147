"""The corpus in the real image: held to its baseline, and a second driver of libtpu agrees."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bake_support import ROOT, Image, result, verb
from process_support import call
from tpuforge.lockfile import read_lock

HARDENED = ("--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--memory=6g")
BASELINE = "/opt/tpuforge/smoke/programs/baseline.toml"


def health(
    image: Image, *arguments: str, options: tuple[str, ...] = ()
) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """Run the compile tier: exit code, checks by name, and the whole report."""
    words = ("health", "--json", "-", "--tier", "compile", *arguments)
    done = image.run(*words, options=(*HARDENED, *options), timeout=600)
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    return done.returncode, {one["id"]: one for one in report["checks"]}, report


def mount(source: Path, target: str) -> tuple[str, str]:
    """A read-only mount."""
    return ("--mount", f"type=bind,source={source},target={target},readonly")


def test_small_programs_are_as_the_baseline_on_every_generation(image: Image) -> None:
    code, checks, _ = health(image, "--target", "all", "-k", "compile.small or compile.large")
    assert code == 0
    assert len(checks) == 8
    assert {one["figures"]["baseline"] for one in checks.values()} == {"within its bands"}
    chips = {one["figures"]["chip"] for one in checks.values()}
    assert chips == {"TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"}


def test_the_slow_ones_are_run_only_when_asked_for(image: Image) -> None:
    choice = ("--target", "v6e:2x2", "-k", "compile.experts-forward")
    code, checks, report = health(image, *choice)
    assert checks == {}
    assert (code, report["tiers"]["compile"]["status"]) == (2, "not run")
    code, checks, _ = health(image, *choice, "--corpus", "full")
    assert code == 0
    assert checks["compile.experts-forward@v6e:2x2"]["figures"]["baseline"] == "within its bands"


def test_what_left_its_band_is_unhealthy_and_another_libtpu_is_not_judged(
    image: Image, tmp_path: Path
) -> None:
    whole = (ROOT / "smoke/programs/baseline.toml").read_text()
    line = next(text for text in whole.splitlines() if text.startswith('"small"'))
    code_bytes = int(line.partition("code_bytes = ")[2].partition(",")[0])
    changed = tmp_path / "changed.toml"
    changed.write_text(
        whole.replace(f"code_bytes = {code_bytes},", f"code_bytes = {code_bytes // 2},")
    )
    target = next(
        text.split('"')[3]
        for text in reversed(whole[: whole.index(line)].splitlines())
        if text.startswith("[")
    )
    choice = ("--target", target, "-k", "compile.small")
    code, checks, _ = health(image, *choice, options=mount(changed, BASELINE))
    (small,) = checks.values()
    assert (code, small["status"]) == (1, "failed")
    assert f"the baseline has {code_bytes // 2} (within 10%)" in small["detail"]
    assert "renew the baseline" in small["remedy"]

    other = tmp_path / "other.toml"
    other.write_text(whole.replace('[libtpu."', '[libtpu."9.'))
    code, checks, _ = health(image, *choice, options=mount(other, BASELINE))
    (small,) = checks.values()
    assert (code, small["status"]) == (0, "passed")
    assert small["figures"]["baseline"].startswith("recorded, not judged")
    assert "recorded, not judged" in small["detail"]


def test_torch_tpu_still_lowers_the_same_bytes(image: Image, tmp_path: Path) -> None:
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    tmp_path.chmod(0o777)
    code = """
import sys
sys.path.insert(0, "/opt/tpuforge")
from pathlib import Path
from smoke import lowering
for name in ("small", "embedding"):
    for one in lowering.lower_named(name, "/results"):
        print("lowered", name, one["kind"], Path(one["path"]).name)
"""
    options = (
        *HARDENED,
        *mount(folder, "/opt/simulator"),
        *mount(folder / "pci", "/sys/bus/pci/devices"),
        *mount(folder / "vfio", "/dev/vfio/7"),
        *("--mount", f"type=bind,source={tmp_path},target=/results"),
        "--env=TPU_LIBRARY_PATH=/opt/simulator/wrapper.so",
        "--env=TPUFORGE_PROGRAMS_DIR=/tmp/kept",
        "--env=TPUFORGE_LOWER_FOR=1.24.0",
        "--env=TF_CPP_MIN_LOG_LEVEL=3",
    )
    done = image.run("python", "-c", code, options=options)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("lowered")]
    assert [line[1:3] for line in lines] == [
        ["small", "forward"], ["embedding", "forward"], ["embedding", "backward"],
    ], done.stderr  # fmt: skip
    from smoke import programs

    kept = programs.named("embedding-backward").text()
    assert (tmp_path / lines[-1][3]).read_bytes() == kept
    # the numbers of the programs start again with every model
    assert lines[0][3] == lines[1][3]
    assert (tmp_path / lines[1][3]).read_bytes() == programs.named("embedding-forward").text()


@pytest.mark.network
def test_jax_makes_the_same_of_the_same_programs(tmp_path: Path) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    done = verb("tpuforge.build.wheelhouse", "--flavour", "pallas", "--python", version)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = {"jax", "jaxlib", "libtpu", "ml-dtypes", "numpy", "opt-einsum", "scipy"}
    lock = ROOT / "lock" / f"pallas-py{version.replace('.', '')}.txt"
    from tpuforge.paths import out_dir

    for pin in read_lock(lock):
        if pin.name in wanted:
            (wheel,) = (out_dir() / "wheelhouse" / pin.sha256).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tmp_path)
            wanted.discard(pin.name)
    assert wanted == set()
    script = ROOT / "tests" / "benchmarks" / "second_compiler"
    names = ("small", "large", "embedding-forward", "collectives-4", "sharded-256")
    refused = ("too-large", "malformed", "unknown-operation")
    compared = call(
        [sys.executable, script, *names, *refused],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert compared.stdout.count("agrees") == len(names) + len(refused)

"""Tier *import*: torch and torch_tpu load, fit each other and libtpu, and harm nothing."""

from __future__ import annotations

import re

import pytest

from smoke import chips, isolate, pjrt, workloads
from smoke.operators import census
from smoke.place import Place
from smoke.plugin import Check

_LIMIT_S = 120.0
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
_REBAKE = "pull the image again by its digest, or bake it again"


@pytest.fixture(scope="session")
def by_name() -> isolate.Ended:
    """One import of torch_tpu by name, which two checks look at."""
    return isolate.run(workloads.import_torch_tpu, timeout=_LIMIT_S, env=_QUIET)


@pytest.mark.check(
    id="import.torch",
    purpose="torch alone loads, multiplies on the CPU and has no CUDA",
    severity="critical",
    remedy=_REBAKE,
)
def test_torch(check: Check) -> None:
    found = check.value(workloads.import_torch, False, timeout=_LIMIT_S, env=_QUIET)
    check.figures |= {"version": found["version"], "import_seconds": found["import_seconds"]}
    assert found["cuda"] is None, f"torch {found['version']} was built with CUDA {found['cuda']}"
    assert found["product"] == 64 * 64 * 128, f"a matrix product is wrong: {found['product']}"
    assert not found["torch_tpu_loaded"], "torch_tpu was loaded although autoloading was off"
    check.detail = f"torch {found['version']} in {found['import_seconds']:.1f} s"


@pytest.mark.check(
    id="import.autoload",
    purpose="a plain import of torch loads torch_tpu, and without a TPU does no harm",
    severity="critical",
    remedy=_REBAKE,
)
def test_autoload(check: Check, tpus: list[chips.Chip]) -> None:
    found = check.value(workloads.import_torch, True, timeout=_LIMIT_S, env=_QUIET)
    check.figures["import_seconds"] = found["import_seconds"]
    assert found["torch_tpu_loaded"], "import torch did not load torch_tpu"
    assert found["product"] == 64 * 64 * 128, f"a matrix product is wrong: {found['product']}"
    seen = "a TPU chip is on the PCI bus" if tpus else "no TPU is on the PCI bus"
    assert found["available"] == bool(tpus), (
        f"{seen}, and torch.accelerator.is_available() says {found['available']}"
    )
    check.detail = f"{found['import_seconds']:.1f} s; {seen}, and torch says so too"


@pytest.mark.check(
    id="import.torch-tpu",
    purpose="torch_tpu loads by name, with the glue for this torch and no other",
    severity="critical",
    remedy="install the torch that this torch_tpu was made for, or " + _REBAKE,
)
def test_torch_tpu(check: Check, here: Place, by_name: isolate.Ended) -> None:
    found = check.took(by_name)
    check.figures["import_seconds"] = found["import_seconds"]
    folders = (here.site / "torch_tpu" / "csrc" / "common").glob("glue_*")
    bundled = sorted(folder.name.removeprefix("glue_") for folder in folders)
    expected = workloads.expected_glue(found["torch"], bundled)
    versions = {m[1] for name in found["glue"] if (m := re.search(r"(\d+_\d+_\d+)", name))}
    check.figures |= {"glue": sorted(versions), "bundled": bundled, "libraries": found["glue"]}
    assert versions, "none of torch_tpu's glue is in memory"
    assert versions == {expected}, (
        f"the glue in memory is for {', '.join(sorted(versions))}, "
        f"and torch {found['torch']} needs {expected}"
    )
    check.detail = f"glue {expected} for torch {found['torch']}, {found['import_seconds']:.1f} s"


@pytest.mark.check(
    id="import.tcmalloc",
    purpose="importing torch_tpu gives no warning about its allocator",
    severity="warning",
    remedy="keep LD_PRELOAD as the image sets it",
)
def test_no_allocator_warning(check: Check, by_name: isolate.Ended) -> None:
    check.peak_memory_bytes = by_name.peak_memory_bytes
    said = [line for line in by_name.output.splitlines() if "tcmalloc" in line.lower()]
    assert not said, said[0].strip()[:300]
    if by_name.error is not None:
        check.cannot(f"torch_tpu could not be imported: {by_name.error}")
    check.detail = "no warning"


@pytest.mark.check(
    id="import.pjrt-pair",
    purpose="libtpu and torch_tpu speak PJRT API versions that are known to work together",
    severity="critical",
    remedy="install the libtpu that the lock names; add a new pair that works to pjrt_pairs.toml",
)
def test_pjrt_pair(check: Check) -> None:
    plugin = check.value(pjrt.measure_plugin, timeout=_LIMIT_S, env=pjrt.QUIET)
    framework = check.value(pjrt.measure_framework, timeout=_LIMIT_S, env=_QUIET)
    check.figures |= {"plugin": plugin["version"], "framework": framework["version"]}
    judged = pjrt.judge(framework["version"], plugin["version"])
    words = f"torch_tpu has PJRT API {framework['version']}, libtpu {plugin['version']}"
    assert judged.works, f"{words}: {judged.why}"
    check.detail = f"{words}: {judged.why}"


@pytest.mark.check(
    id="import.census",
    purpose="torch_tpu brings kernels, and every core ATen operator is served",
    severity="warning",
    remedy="see which operators are missing in health operators; " + _REBAKE,
)
def test_census(check: Check, by_name: isolate.Ended) -> None:
    if by_name.error is not None:
        check.cannot(f"torch_tpu could not be imported: {by_name.error}")
    found = check.value(census.take, timeout=_LIMIT_S, env=_QUIET)
    core, counts = found["core"], found["counts"]
    check.figures |= {**counts, "overloads": found["overloads"]}
    check.figures |= {"direct_operators": found["direct_operators"], "core": core["overloads"]}
    assert counts["direct"], "torch_tpu registered no kernel"
    assert core["overloads"], "PyTorch counts no operator among its core"
    missing = ", ".join(core["missing"][:10])
    assert not core["missing"], f"{len(core['missing'])} core operators have no kernel: {missing}"
    check.detail = (
        f"{found['overloads']} overloads: {counts['direct']} direct, {counts['composite']} "
        f"composite, {counts['unsupported']} unsupported; core {core['overloads']} of "
        f"{core['overloads']}"
    )

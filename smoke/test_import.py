"""Tier *import*: torch and torch_tpu load, fit each other and libtpu, and harm nothing."""

from __future__ import annotations

import os
import re

import pytest

from smoke import chips, flavours, imports, isolate, pjrt, workloads, xla
from smoke.operators import census
from smoke.place import Place
from smoke.plugin import REBAKE, Check

_LIMIT_S = 120.0
# a flag that ends processes is the business of one check, not of all
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": None, "LIBTPU_INIT_ARGS": None}
_COMPILER = {**pjrt.QUIET, **_QUIET}
# a module that looks for a TPU finds none in time, and nothing is fetched
_FLAVOUR = {**_COMPILER, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
_FLAGS_SHOWN = 200
AUTOLOAD_SECONDS = 60.0
"""The bound on a plain import of torch: 3.8 s on an idle machine, 25 s on a far too busy one."""

AUTOLOAD_BYTES = 1_000_000_000
"""The bound on its memory: measured 516 to 552 MB."""


@pytest.fixture(scope="session")
def by_name() -> isolate.Ended:
    """One import of torch_tpu by name, which two checks look at."""
    return isolate.run(workloads.import_torch_tpu, timeout=_LIMIT_S, env=_QUIET)


@pytest.fixture(scope="session")
def autoloaded() -> isolate.Ended:
    """One plain import of torch, as a user's, which three checks look at."""
    return isolate.run(imports.import_plain, timeout=_LIMIT_S, env=_QUIET)


@pytest.mark.check(
    id="import.torch",
    purpose="torch alone loads, multiplies on the CPU and has no CUDA",
    severity="critical",
    remedy=REBAKE,
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
    remedy=REBAKE,
)
def test_autoload(check: Check, tpus: list[chips.Chip], autoloaded: isolate.Ended) -> None:
    found = check.took(autoloaded)
    check.figures["import_seconds"] = found["import_seconds"]
    assert found["torch_tpu_loaded"], "import torch did not load torch_tpu"
    assert found["product"] == 64 * 64 * 128, f"a matrix product is wrong: {found['product']}"
    seen = "a TPU chip is on the PCI bus" if tpus else "no TPU is on the PCI bus"
    assert found["available"] == bool(tpus), (
        f"{seen}, and torch.accelerator.is_available() says {found['available']}"
    )
    check.detail = f"{found['import_seconds']:.1f} s; {seen}, and torch says so too"


@pytest.mark.check(
    id="import.cost",
    purpose=f"a plain import of torch takes under {AUTOLOAD_SECONDS:.0f} s and "
    f"{AUTOLOAD_BYTES / 1e9:.0f} GB",
    severity="warning",
    remedy="try again when the machine and its disk are idle; if it comes back, compare with "
    "python -X importtime -c 'import torch'",
)
def test_cost(check: Check, autoloaded: isolate.Ended) -> None:
    if autoloaded.error is not None:
        check.cannot(f"torch could not be imported: {autoloaded.error}")
    seconds = autoloaded.value["import_seconds"]
    peak = autoloaded.peak_memory_bytes
    check.peak_memory_bytes = peak
    check.figures |= {
        "import_seconds": seconds,
        "peak_memory_bytes": peak,
        "bound_seconds": AUTOLOAD_SECONDS,
        "bound_bytes": AUTOLOAD_BYTES,
    }
    words = f"{seconds:.1f} s and {peak / 1e6:.0f} MB"
    bounds = f"{AUTOLOAD_SECONDS:.0f} s and {AUTOLOAD_BYTES / 1e6:.0f} MB"
    within = seconds < AUTOLOAD_SECONDS and peak < AUTOLOAD_BYTES
    assert within, f"it took {words}; the bounds are {bounds}"
    check.detail = words


@pytest.mark.check(
    id="import.private-use",
    purpose="torch's spare backend is torch_tpu's: called tpu where a TPU is, else taken by nobody",
    severity="critical",
    remedy="remove the package that registers another backend, or " + REBAKE,
)
def test_private_use(check: Check, tpus: list[chips.Chip], autoloaded: isolate.Ended) -> None:
    found = check.took(autoloaded)["spare"]
    check.figures |= found
    # torch_tpu gives the backend its name once it sees a TPU
    expected = "tpu" if tpus else imports.UNNAMED
    assert found["name"] == expected, (
        f"torch's spare backend is called {found['name']} instead of {expected}"
    )
    assert found["package"] == "torch_tpu", f"torch.tpu comes from {found['package']}"
    assert not (tpus and found["leftovers"]), f"torch still has {', '.join(found['leftovers'])}"
    seen = "a TPU is here, and it is called tpu" if tpus else "no TPU is here, and nobody took it"
    check.detail = f"{seen}; torch.tpu is torch_tpu's"


@pytest.mark.check(
    id="import.torch-tpu",
    purpose="torch_tpu loads by name, with the glue for this torch and no other",
    severity="critical",
    remedy="install the torch that this torch_tpu was made for, or " + REBAKE,
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
    plugin = check.value(pjrt.measure_plugin, timeout=_LIMIT_S, env=_COMPILER)
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
    remedy="see which operators are missing in health operators; " + REBAKE,
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


@pytest.mark.check(
    id="import.stablehlo-pair",
    purpose="torch_tpu can write programs in a StableHLO version that libtpu reads",
    severity="critical",
    remedy="install the libtpu that the lock names, or " + REBAKE,
)
@pytest.mark.usefixtures("pypjrt")
def test_stablehlo_pair(check: Check) -> None:
    plugin = check.value(xla.measure_plugin, timeout=_LIMIT_S, env=_COMPILER)
    framework = check.value(xla.measure_framework, timeout=_LIMIT_S, env=_QUIET)
    check.figures |= {"plugin": plugin, "framework": framework}
    meeting = xla.meet(framework, plugin)
    assert meeting.version is not None, meeting.why
    check.figures["written"] = meeting.version
    check.detail = meeting.why


@pytest.mark.check(
    id="import.flavour",
    purpose="what the image's flavour adds loads, each module in a process of its own",
    severity="critical",
    remedy=REBAKE,
)
def test_flavour(check: Check, here: Place) -> None:
    names = flavours.own(check, here, "imports")
    broken = []
    for name in names:
        ended = check.isolated(flavours.import_module, name, timeout=_LIMIT_S, env=_FLAVOUR)
        if ended.error is not None:
            broken.append(f"{name}: {ended.story}")
        else:
            check.figures[name] = ended.value
    assert not broken, "\n".join(broken)
    versions = [f"{name} {check.figures[name]['version']}".rstrip() for name in names]
    check.detail = ", ".join(versions)


@pytest.mark.check(
    id="import.tools",
    purpose="the commands that the image's flavour adds answer",
    severity="critical",
    remedy=REBAKE,
)
def test_tools(check: Check, here: Place) -> None:
    said = {}
    for command in flavours.own(check, here, "tools"):
        said[" ".join(command)] = flavours.run_tool(command, _LIMIT_S)
    check.figures |= said
    check.detail = "; ".join(said.values())


@pytest.mark.check(
    id="import.flags",
    purpose="XLA_FLAGS and LIBTPU_INIT_ARGS hold no flag that ends every process",
    severity="critical",
    remedy="remove the unknown flag: XLA_FLAGS is for flags of XLA itself, flags of the TPU "
    "compiler (--xla_tpu_…) belong into LIBTPU_INIT_ARGS",
)
@pytest.mark.usefixtures("pypjrt")
def test_flags(check: Check) -> None:
    problems, named = [], []
    for name, function in (
        ("XLA_FLAGS", xla.read_flags),
        ("LIBTPU_INIT_ARGS", xla.read_arguments),
    ):
        value = os.environ.get(name)
        if not value:
            continue
        named.append(name)
        ended = check.isolated(function, timeout=_LIMIT_S, env={**_COMPILER, name: value})
        if ended.error is not None:
            problems.append(f"{name}={value[:_FLAGS_SHOWN]} ends the process: {_said(ended)}")
    check.figures["named"] = named
    assert not problems, "; ".join(problems)
    check.detail = f"every flag in {' and '.join(named)} is known" if named else "neither is set"


def _said(ended: isolate.Ended) -> str:
    """What a process said of a flag before it ended, without the head of its log line."""
    lines = [line for line in ended.output.splitlines() if "nknown" in line and "flag" in line]
    return (lines[0].partition("] ")[2] or lines[0]) if lines else str(ended.error)

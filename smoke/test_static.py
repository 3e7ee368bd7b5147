"""Tier *static*: the files and the environment of the image; nothing of torch is loaded."""

from __future__ import annotations

import platform
import sys
from typing import Any

import pytest

from smoke import chips, installed, statics, workloads
from smoke.place import Place
from smoke.plugin import REBAKE, Check


@pytest.fixture(scope="session")
def facts(here: Place) -> dict[str, Any]:
    """The image's own facts; checks that need them are not run outside an image."""
    found = here.facts
    if found is None:
        pytest.skip(f"this is not an image: {here.home / 'image.json'} is not there")
    return found


@pytest.fixture(scope="session")
def tags() -> Any:
    """The tags of wheels, from the package that reads requirements too."""
    return pytest.importorskip(
        "packaging.tags", reason="the package packaging, which pytest needs, is missing"
    )


def _none(problems: list[str]) -> None:
    shown = "; ".join(problems[:5])
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    assert not problems, shown + more


@pytest.mark.check(
    id="static.lock",
    purpose="lock.txt is the lock that the image was made from",
    severity="critical",
    remedy=REBAKE,
)
def test_lock(check: Check, here: Place, facts: dict[str, Any]) -> None:
    _none(statics.lock_problems(here, facts))
    check.detail = f"lock.txt has the digest {facts['lock_sha256'][:12]}… that the image states"


@pytest.mark.check(
    id="static.closure",
    purpose="the installed packages are those of the lock, no more, no fewer, no other version",
    severity="critical",
    remedy=f"undo a pip install inside the container, or {REBAKE}",
)
@pytest.mark.usefixtures("facts")
def test_closure(check: Check, here: Place) -> None:
    _none(installed.closure_problems(here.site, here.home / "lock.txt"))
    count = len(installed.distributions(here.site))
    check.figures["packages"] = count
    check.detail = f"{count} packages: those of the lock, and pip"


@pytest.mark.check(
    id="static.requirements",
    purpose="every package finds the versions of the others that it asks for",
    severity="critical",
    remedy="install the version that the named package needs, or " + REBAKE,
)
@pytest.mark.usefixtures("tags")
def test_requirements(check: Check, here: Place) -> None:
    problems, count = installed.requirement_problems(here.site)
    check.figures["requirements"] = count
    _none(problems)
    check.detail = f"{count} requirements are met"


@pytest.mark.check(
    id="static.platform",
    purpose="every package and library was made for this Python and this machine",
    severity="critical",
    remedy="bake the image for this Python and this machine, or pull the one that was",
)
def test_platform(check: Check, here: Place, facts: dict[str, Any], tags: Any) -> None:
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert facts.get("python") == minor, (
        f"this is Python {minor}, and the image was made for Python {facts.get('python')}"
    )
    problems, count = installed.platform_problems(
        here.site,
        {str(tag) for tag in tags.sys_tags()},
        minor.replace(".", ""),
        platform.machine(),
    )
    check.figures |= {"wheels": count.wheels, "libraries": count.libraries}
    _none(problems)
    check.detail = f"{count.wheels} packages and {count.libraries} libraries fit Python {minor}"


@pytest.mark.check(
    id="static.record",
    purpose="every installed file has the digest that its wheel recorded",
    severity="critical",
    remedy=f"{REBAKE}; if it comes back, check the disk and the memory of this machine",
)
def test_record(check: Check, here: Place) -> None:
    problems, figures = installed.record_problems(here.site)
    check.figures |= {"files": figures.files, "bytes": figures.size}
    assert figures.files, "there is no recorded file at all"
    _none(problems)
    check.detail = f"{figures.files} files, {figures.size / 1e9:.2f} GB"


@pytest.mark.check(
    id="static.unrecorded",
    purpose="no file lies among the packages that no package brought",
    severity="warning",
    remedy=f"remove the file, or {REBAKE}",
)
def test_unrecorded(check: Check, here: Place) -> None:
    strays = installed.unrecorded(here.site)
    assert not strays, f"{len(strays)} files that no package brought, such as {strays[0]}"
    check.detail = "every file belongs to a package"


@pytest.mark.check(
    id="static.bytecode",
    purpose="byte code was compiled from the source beside it",
    severity="critical",
    remedy=REBAKE,
)
def test_bytecode(check: Check, here: Place) -> None:
    problems, count = installed.bytecode_problems(here.site)
    check.figures["files"] = count
    _none(problems)
    check.detail = f"{count} files of byte code belong to their source"


@pytest.mark.check(
    id="static.cuda",
    purpose="no CUDA anywhere: no package, no library, and torch is the CPU build",
    severity="critical",
    remedy="remove the package that brought it, or " + REBAKE,
)
def test_no_cuda(check: Check, here: Place) -> None:
    _none(installed.cuda_problems(here.site))
    check.detail = "no CUDA package or library; torch is a +cpu build"


@pytest.mark.check(
    id="static.needed",
    purpose="every shared library finds the libraries that it needs",
    severity="critical",
    remedy="install the named library from the distribution, or " + REBAKE,
)
def test_needed_libraries(check: Check, here: Place) -> None:
    search = here.environ.get("LD_LIBRARY_PATH", "")
    needs, _, figures = installed.link_problems(here.site, here.root, search)
    check.figures["libraries"] = figures.files
    assert figures.files, "there is no shared library at all"
    _none(needs)
    check.detail = f"{figures.files} libraries find all that they need"


@pytest.mark.check(
    id="static.versions",
    purpose="the system's C and C++ libraries are new enough for every library",
    severity="critical",
    remedy="use a distribution with a newer glibc and libstdc++: Debian 12 or Ubuntu 22.04 will do",
)
def test_symbol_versions(check: Check, here: Place) -> None:
    search = here.environ.get("LD_LIBRARY_PATH", "")
    _, versions, figures = installed.link_problems(here.site, here.root, search)
    check.figures |= {f"wanted_{name}": value for name, value in sorted(figures.floors.items())}
    check.figures |= {f"offered_{name}": value for name, value in sorted(figures.offered.items())}
    assert "GLIBC" in figures.offered, "no system C library was found to compare with"
    _none(versions)
    check.detail = ", ".join(
        f"{name} {figures.floors[name]} wanted, {figures.offered[name]} here"
        for name in ("GLIBC", "GLIBCXX")
        if name in figures.floors and name in figures.offered
    )


@pytest.mark.check(
    id="static.torch-tpu",
    purpose="torch_tpu comes from the stated XLA commit, with one XLA and no torch of its own",
    severity="critical",
    remedy=REBAKE,
)
def test_torch_tpu_files(check: Check, here: Place) -> None:
    commit = (here.facts or {}).get("xla_commit")
    _none(statics.torch_tpu_problems(here.site, commit))
    check.detail = f"XLA {commit[:12]}…" if commit else "one XLA; no image facts to compare with"


@pytest.mark.check(
    id="static.glue",
    purpose="torch_tpu has whole glue for every torch that it claims to serve, neighbours included",
    severity="critical",
    remedy="install the torch_tpu that the lock names, or " + REBAKE,
)
@pytest.mark.usefixtures("tags")
def test_glue(check: Check, here: Place) -> None:
    found = installed.glues(here.site)
    problems, served = installed.glue_problems(found)
    check.figures |= {"claims": found.wanted, "served": served}
    _none(problems)
    own = served[found.torch.partition("+")[0]]
    check.detail = (
        f"torch {found.torch} is served by the glue for {own}; "
        f"whole glue for {', '.join(sorted(set(served.values())))}"
    )


@pytest.mark.check(
    id="static.abi",
    purpose="the installed torch defines all that torch_tpu's glue for it needs",
    severity="critical",
    remedy="install the torch that this torch_tpu was made for, or " + REBAKE,
)
def test_abi(check: Check, here: Place) -> None:
    found = installed.glues(here.site)
    version = workloads.expected_glue(found.torch, sorted(found.modules))
    problems, count = installed.abi_problems(here.site, here.root, version)
    check.figures |= {"glue": version, "symbols": count}
    assert count, f"the glue for torch {version.replace('_', '.')} needs nothing at all"
    _none(problems)
    check.detail = f"{count} symbols of the glue for torch {version.replace('_', '.')} are defined"


@pytest.mark.check(
    id="static.libtpu",
    purpose="libtpu brings its library, and that is a PJRT plugin",
    severity="critical",
    remedy="install the libtpu that the lock names, or " + REBAKE,
)
def test_libtpu_files(check: Check, here: Place) -> None:
    _none(statics.libtpu_problems(here.site))
    check.detail = "libtpu.so defines GetPjrtApi"


@pytest.mark.check(
    id="static.backends",
    purpose="torch_tpu, and no other package, registers itself as torch's extra backend",
    severity="critical",
    remedy="remove the other package, or " + REBAKE,
)
def test_backends(check: Check, here: Place) -> None:
    _none(installed.backend_problems(here.site))
    check.detail = "torch_tpu is the only one"


@pytest.mark.check(
    id="static.account",
    purpose="the image's own user exists, has a home and is not root",
    severity="critical",
    remedy=REBAKE,
)
def test_account(check: Check, here: Place, facts: dict[str, Any]) -> None:
    _none(statics.account_problems(here, facts))
    check.detail = f"{facts['user']}, uid {facts['uid']}"


@pytest.mark.check(
    id="static.user",
    purpose="this container does not run as root",
    severity="warning",
    remedy="run without --user 0, unless the TPU driver of this host needs root",
)
@pytest.mark.usefixtures("facts")
def test_user(check: Check, here: Place) -> None:
    assert here.uid != 0, "it runs as root, which whoever started the container chose"
    check.detail = f"it runs as {statics.user_words(here.uid)}"


@pytest.mark.check(
    id="static.preload",
    purpose="every library that LD_PRELOAD names is there and loaded; the image's own exists",
    severity="critical",
    remedy="correct LD_PRELOAD, or " + REBAKE,
)
def test_preload(check: Check, here: Place, facts: dict[str, Any]) -> None:
    own = str(facts.get("preload") or "")
    problems = statics.preload_problems(here)
    if not own:
        problems.append("image.json names no library to preload")
    elif not here.under(own).is_file():
        problems.append(f"the image's own {own} is not there")
    _none(problems)
    check.detail = f"LD_PRELOAD={here.environ.get('LD_PRELOAD', '')}"


@pytest.mark.check(
    id="static.allocator",
    purpose="tcmalloc, which TorchTPU recommends, is the allocator of this container's processes",
    severity="warning",
    remedy="do not unset LD_PRELOAD; add your own libraries after the image's",
)
def test_allocator(check: Check, here: Place, facts: dict[str, Any]) -> None:
    own = str(facts.get("preload"))
    value = here.environ.get("LD_PRELOAD", "")
    assert own in value, f"LD_PRELOAD is {value!r} and does not name the image's {own}"
    assert statics.owned_by_tcmalloc(), "memory from malloc is not tcmalloc's"
    check.detail = f"memory from malloc is tcmalloc's: {own}"


@pytest.mark.check(
    id="static.guard",
    purpose="the image holds pip to the CPU build of torch",
    severity="critical",
    remedy=REBAKE,
)
def test_guard(check: Check, here: Place, facts: dict[str, Any]) -> None:
    _none(statics.guard_problems(here, facts))
    check.detail = f"/etc/pip.conf holds torch to {facts.get('torch')}"


@pytest.mark.check(
    id="static.guard-env",
    purpose="PIP_CONSTRAINT and UV_CONSTRAINT hold torch to its CPU build",
    severity="warning",
    remedy="name the image's own constraints.txt as well: PIP_CONSTRAINT takes several files",
)
def test_guard_environment(check: Check, here: Place, facts: dict[str, Any]) -> None:
    _none(statics.guard_env_problems(here, facts))
    check.detail = "both name a constraint that keeps torch on its CPU build"


@pytest.mark.check(
    id="static.caches",
    purpose="folders for caches that the environment names can be written by this user",
    severity="critical",
    remedy="name a folder that this user can write to, mount one, or unset the variable",
)
def test_caches(check: Check, here: Place) -> None:
    problems, named = statics.cache_problems(here)
    check.figures["named"] = named
    _none(problems)
    check.detail = ", ".join(named) or "the environment names none; /tmp is used"


@pytest.mark.check(
    id="static.settings",
    purpose="no setting keeps a plain import of torch from this image's torch_tpu and libtpu",
    severity="warning",
    remedy="unset the named variable, unless you meant it",
)
def test_settings(check: Check, here: Place) -> None:
    _none(statics.setting_problems(here))
    check.detail = "nothing is turned off, replaced or shadowed"


@pytest.mark.check(
    id="static.tpu-lock",
    purpose="no lock file of libtpu, left by another user's process, keeps this user out",
    severity="critical",
    remedy="remove the file as its owner or as root; give every container a /tmp of its own",
)
def test_lock_file(check: Check, here: Place) -> None:
    problems, words = statics.lock_file_problems(here)
    _none(problems)
    check.detail = words


@pytest.mark.check(
    id="static.metadata",
    purpose="with a TPU here, libtpu does not wait for a metadata server that tells it nothing",
    severity="warning",
    remedy="give the container the host's network, or set TPU_SKIP_MDS_QUERY=1 with "
    "TPU_ACCELERATOR_TYPE, TPU_WORKER_ID=0 and TPU_WORKER_HOSTNAMES=localhost",
)
def test_metadata(check: Check, here: Place, tpus: list[chips.Chip], kind: str | None) -> None:
    if not tpus or here.environ.get("TPUFORGE_SIMULATOR"):
        check.cannot("no TPU is here, so nothing asks a metadata server")
    if here.environ.get("TPU_SKIP_MDS_QUERY"):
        check.detail = "libtpu was told not to ask"
        return
    assert kind is not None, (
        "no metadata server names this slice, it refuses or is not there; libtpu asks for minutes"
    )
    check.detail = "the metadata server names the slice"


@pytest.mark.check(
    id="static.leftovers",
    purpose="the image holds no identity, cache or log of its build",
    severity="warning",
    remedy=REBAKE,
)
@pytest.mark.usefixtures("facts")
def test_leftovers(check: Check, here: Place) -> None:
    _none(statics.leftovers(here))
    check.detail = "no machine-id, package lists, caches or logs"

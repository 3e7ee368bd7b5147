"""Broken images: the right check fails, with the right remedy, and nothing else takes the blame.

No image is baked for this. A broken one is the image that everybody gets with a few of its files
replaced by mounts, their RECORD lines included where a wheel would bring them so. What does not get
in each other's way is broken in one image: every sentence that a check says must then name
something that this check is to blame, and everything that is broken must be named.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bake_support import HARDENED, Image, result
from smoke_suite_support import elf

SITE = "/opt/venv/lib/python3.11/site-packages"
HOME = "/opt/tpuforge"
TORCH_TPU, TORCH = "torch_tpu-0.2.0.dist-info", "torch-2.13.0+cpu.dist-info"
GLUE = "torch_tpu/_internal/env_2_13_0.so"


@dataclass
class Workshop:
    """Breaks one image: takes files out of it, and makes mounts that put changed ones back.

    Attributes:
        image: The image.
        container: A container of it that is never started: files are copied out of it.
        folder: Where files of this machine lie.
        changed: What has been broken so far: absolute path to content.
        folders: Folders that are put in their place as a whole.
        options: Further options of the container.
    """

    image: Image
    container: str
    folder: Path
    changed: dict[str, bytes] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    def read(self, path: str) -> bytes:
        """A file of the image, as it is by now."""
        if path in self.changed:
            return self.changed[path]
        place = self.folder.parent / "original" / path.lstrip("/")
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            done = self.image.engine.run("cp", f"{self.container}:{path}", str(place))
            assert done.returncode == 0, done.stderr
        return place.read_bytes()

    def put(self, files: Mapping[str, bytes]) -> None:
        """Have files in their places: absolute path to content."""
        self.changed.update(files)

    def record(
        self, info: str, changed: Mapping[str, bytes], gone: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Let a package's RECORD be as if it had brought these files so, and not those."""
        path = f"{SITE}/{info}/RECORD"
        rows = [row for row in csv.reader(self.read(path).decode().splitlines()) if row]
        text = io.StringIO()
        for row in rows:
            if gone(row[0]):
                continue
            data = changed.get(row[0])
            new = [row[0], _digest(data), str(len(data))] if data is not None else row
            csv.writer(text, lineterminator="\n").writerow(new)
        self.put({path: text.getvalue().encode()})

    def replace(self, info: str, changed: Mapping[str, bytes]) -> None:
        """Let a package's wheel have brought these files so: names below site-packages."""
        self.put({f"{SITE}/{name}": data for name, data in changed.items()})
        self.record(info, changed)

    def other_version(self, name: str, old: str, new: str) -> None:
        """Let the image have been baked from a lock with another version of a package."""
        info = f"{name}-{old}.dist-info"
        metadata = f"{info}/METADATA"
        text = self.read(f"{SITE}/{metadata}").decode()
        changed = re.sub(rf"^Version: {re.escape(old)}$", f"Version: {new}", text, flags=re.M)
        assert changed != text
        self.replace(info, {metadata: changed.encode()})
        lock = self.read(f"{HOME}/lock.txt").decode()
        assert f"{name}=={old}" in lock
        locked = lock.replace(f"{name}=={old}", f"{name}=={new}").encode()
        facts = json.loads(self.read(f"{HOME}/image.json"))
        facts["lock_sha256"] = hashlib.sha256(locked).hexdigest()
        if name in facts:
            facts[name] = new
        self.put({f"{HOME}/lock.txt": locked, f"{HOME}/image.json": json.dumps(facts).encode()})

    def mounts(self) -> list[str]:
        """The options of a container of the broken image."""
        options = [*self.options]
        for count, folder in enumerate(self.folders):
            source = self.folder / f"folder-{count}"
            source.mkdir()
            options += mount(source, folder)
        for count, (path, data) in enumerate(self.changed.items()):
            inside = [one for one in self.folders if path.startswith(f"{one}/")]
            source = self.folder / f"file-{count}"
            if inside:
                place = self.folders.index(inside[0])
                source = self.folder / f"folder-{place}" / path.removeprefix(f"{inside[0]}/")
                source.parent.mkdir(parents=True, exist_ok=True)
            source.write_bytes(data)
            options += [] if inside else mount(source, path)
        return options


def mount(source: Path, target: str) -> list[str]:
    """A read-only mount."""
    return ["--mount", f"type=bind,source={source},target={target},readonly"]


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _without_library(shop: Workshop) -> None:
    kept = ("__init__.py", "__pycache__/__init__.cpython-311.pyc")
    shop.put({f"{SITE}/libtpu/{name}": shop.read(f"{SITE}/libtpu/{name}") for name in kept})
    shop.folders.append(f"{SITE}/libtpu")
    shop.record(
        "libtpu-0.0.52.dist-info",
        {},
        lambda name: name.startswith("libtpu/") and name.removeprefix("libtpu/") not in kept,
    )


_CHOOSE = """
import sys
sys.path.insert(0, "/opt/tpuforge")
from pathlib import Path
from smoke import elf
site = Path(sys.argv[1])
libraries = list((site / "torch/lib").glob("*.so*"))
wanted = elf.undefined(site / "torch_tpu/csrc/common/glue_2_13_0/libpywrap_2_13_0_common.so")
own = wanted - elf.missing(site / "torch/lib/libc10.so", wanted)
for library in [*libraries, *(site / "torch").glob("*.so")]:
    own -= elf.undefined(library)
print(min(own).decode())
"""


def _another_abi(shop: Workshop) -> None:
    # a function that only torch_tpu calls, so that torch itself stays whole
    done = shop.image.run("python", "-c", _CHOOSE, SITE, options=HARDENED)
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip().encode()
    data = shop.read(f"{SITE}/torch/lib/libc10.so")
    assert b"\0" + name + b"\0" in data
    other = name[:-1] + (b"w" if name[-1:] != b"w" else b"v")
    changed = data.replace(b"\0" + name + b"\0", b"\0" + other + b"\0")
    shop.replace(TORCH, {"torch/lib/libc10.so": changed})


def _flipped_byte(shop: Workshop) -> None:
    data = bytearray(shop.read(f"{SITE}/{GLUE}"))
    data[len(data) // 2] ^= 1
    shop.put({f"{SITE}/{GLUE}": bytes(data)})


def _cuda_torch(shop: Workshop) -> None:
    metadata, source = f"{TORCH}/METADATA", "torch/version.py"
    code = "torch/__pycache__/version.cpython-311.pyc"
    text = shop.read(f"{SITE}/{metadata}").decode()
    text = text.replace(
        "\nVersion: 2.13.0+cpu\n",
        "\nVersion: 2.13.0+cu126\nRequires-Dist: nvidia-cublas-cu12==12.6.4.1\n",
    )
    version = shop.read(f"{SITE}/{source}").decode().replace("+cpu", "+cu126")
    version = re.sub(r"^(cuda\b[^=\n]*=).*$", r"\1 '12.6'", version, flags=re.M)
    compiled = bytearray(shop.read(f"{SITE}/{code}"))
    compiled[8:16] = importlib.util.source_hash(version.encode())
    changed = {metadata: text.encode(), source: version.encode(), code: bytes(compiled)}
    info = "nvidia_cublas_cu12-12.6.4.1.dist-info"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: nvidia-cublas-cu12\nVersion: 12.6.4.1\n",
        "nvidia/cublas/lib/libcublas.so.12": elf(("libc.so.6",)),
    }
    rows = [f"{name},{_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    shop.replace(TORCH, changed)
    shop.put({f"{SITE}/{name}": data for name, data in files.items()})


def _numpy_1(shop: Workshop) -> None:
    shop.other_version("numpy", "2.4.6", "1.26.4")


def _libtpu_too_old(shop: Workshop) -> None:
    shop.other_version("libtpu", "0.0.52", "0.0.49")


def _record_changed(shop: Workshop) -> None:
    path = f"{SITE}/{TORCH_TPU}/RECORD"
    text = shop.read(path).decode()
    changed = re.sub(r"^(torch_tpu/_loader\.py,sha256=)(.)", r"\1-\2", text, flags=re.M)
    assert changed != text
    shop.put({path: changed.encode()})


def _another_python(shop: Workshop) -> None:
    for info in (TORCH, TORCH_TPU):
        wheel = f"{info}/WHEEL"
        text = shop.read(f"{SITE}/{wheel}").replace(b"cp311", b"cp312")
        shop.replace(info, {wheel: text})


def _wrong_machine(shop: Workshop) -> None:
    data = bytearray(shop.read(f"{SITE}/{GLUE}"))
    data[18:20] = (183).to_bytes(2, "little")
    shop.replace(TORCH_TPU, {GLUE: bytes(data)})


def _two_metadata(shop: Workshop) -> None:
    info = "torch_tpu-0.1.9.dist-info"
    files = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.1.9\n",
        f"{info}/RECORD": f"{info}/METADATA,,\n{info}/RECORD,,\n".encode(),
    }
    shop.put({f"{SITE}/{name}": data for name, data in files.items()})


def _unwritable_cache(shop: Workshop) -> None:
    shop.folders.append("/cache")
    shop.options.append("--env=TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT=/cache")


def _without_allocator(shop: Workshop) -> None:
    gone = "/usr/lib/x86_64-linux-gnu/libtcmalloc_gone.so"
    shop.options.append(f"--env=LD_PRELOAD={gone}")


def _older_api(shop: Workshop) -> None:
    # the simulator's plugin is a real one, built against an API of long ago
    folder = Path(result("tpuforge.smoke.simulator")["folder"])
    library = (folder / "wrapper.so").read_bytes()
    shop.replace("libtpu-0.0.52.dist-info", {"libtpu/libtpu.so": library})
    shop.options += mount(folder, "/opt/simulator")
    shop.options.append("--env=TPUFORGE_PJRT_PLUGIN=/opt/simulator/plugin.so")


def _traps(shop: Workshop) -> None:
    own = shop.folder / "tmp"
    own.mkdir()
    own.chmod(0o1777)
    (own / "libtpu_lockfile").touch(0o644)
    (own / "libtpu_lockfile").chmod(0o644)
    other = "other_backend-1.0.dist-info"
    files = {
        f"{other}/METADATA": b"Metadata-Version: 2.1\nName: other-backend\nVersion: 1.0\n",
        f"{other}/entry_points.txt": b"[torch.backends]\nother = other:load\n",
    }
    rows = [f"{other}/{name},," for name in ("METADATA", "entry_points.txt", "RECORD")]
    files[f"{other}/RECORD"] = "\n".join([*rows, ""]).encode()
    shop.put({f"{SITE}/{name}": data for name, data in files.items()})
    shop.options += [
        "--mount",
        f"type=bind,source={own},target=/tmp",
        "--env=XLA_FLAGS=--xla_tpu_of_another_program=true",
        "--env=LIBTPU_INIT_ARGS=--no_such_argument=1",
        "--env=TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    ]


@dataclass(frozen=True)
class Broken:
    """Something broken, and who must be blamed.

    Attributes:
        build: Breaks it.
        check: The check that must fail.
        detail: What it must say, a pattern.
        remedy: What it must advise, a part of it.
        also: Checks that may fail as well, and must then name the same thing.
        besides: A further sentence that these checks may say of it, a pattern.
        image: The broken image that it is a part of.
        tries: Checks of the import tier that run on it besides the whole static tier.
    """

    build: Callable[[Workshop], None]
    check: str
    detail: str
    remedy: str
    also: frozenset[str] = field(default_factory=frozenset)
    besides: str = r"(?!)"
    image: str = "many"
    tries: str = ""


_AGAIN = "pull the image again by its digest"
BROKEN = {
    "libtpu without its .so": Broken(
        _without_library, "static.libtpu", r"libtpu\.so", "install the libtpu that the lock names",
        also=frozenset({"import.pjrt-pair"}), tries="import.pjrt-pair",
    ),
    "torch of another ABI": Broken(
        _another_abi, "static.abi", r"_ZN?K?\w*c10", "install the torch that this torch_tpu",
        also=frozenset({"import.torch-tpu"}), image="abi", tries="import.torch",
    ),
    "a flipped byte in a glue": Broken(
        _flipped_byte, "static.record", r"torch-tpu: .*env_2_13_0\.so has another digest", _AGAIN
    ),
    "CUDA torch": Broken(
        _cuda_torch, "static.cuda", r"nvidia|cu126", "remove the package that brought it",
        also=frozenset({"static.closure"}),
        besides="torch/version.py does not say that torch was built without CUDA|^and 1 more$",
    ),
    "numpy 1": Broken(
        _numpy_1, "static.requirements", r"torch-tpu 0\.2\.0 needs numpy>=2, and numpy 1\.26\.4",
        "install the version that the named package needs",
    ),
    "tcmalloc path missing": Broken(
        _without_allocator, "static.preload", r"tcmalloc", "correct LD_PRELOAD",
        also=frozenset({"static.allocator", "import.tcmalloc"}), tries="import.tcmalloc",
    ),
    "RECORD changed": Broken(
        _record_changed, "static.record", r"_loader\.py has another digest than RECORD", _AGAIN
    ),
    "a Python of another minor": Broken(
        _another_python, "static.platform",
        r"torch(-tpu)? \S+ was made for cp312.*3\.11", "bake the image for this Python",
    ),
    "unwritable cache": Broken(
        _unwritable_cache, "static.caches", r"CACHE_ROOT names /cache, which cannot be written",
        "name a folder that this user can write to",
    ),
    "libtpu too old": Broken(
        _libtpu_too_old, "static.requirements", r"needs libtpu>=0\.0\.50, and libtpu 0\.0\.49",
        "install the version that the named package needs",
    ),
    "two torch_tpu metadata": Broken(
        _two_metadata, "static.closure", r"torch-tpu is installed twice, as 0\.1\.9 and 0\.2\.0",
        "undo a pip install", besides="torch-tpu is 0.1.9, the lock says 0.2.0",
    ),
    "wrong arch": Broken(
        _wrong_machine, "static.platform", r"env_2_13_0\.so", "for this Python and this machine",
        also=frozenset({"import.torch-tpu"}), image="other", tries="import.torch-tpu",
    ),
    "a libtpu of an older API": Broken(
        _older_api, "import.pjrt-pair", r"libtpu 0\.81: nobody has tried this pair",
        "install the libtpu that the lock names", image="other", tries="import.pjrt-pair",
    ),
}  # fmt: skip
_PARTS = {
    name: [one for one in BROKEN.values() if one.image == name]
    for name in dict.fromkeys(one.image for one in BROKEN.values())
}


@pytest.fixture(scope="module")
def container(image: Image) -> Iterator[str]:
    """A container of the image that is never started."""
    created = image.engine.run("create", image.name, "true")
    assert created.returncode == 0, created.stderr
    yield created.stdout.strip()
    image.engine.run("rm", created.stdout.strip())


@pytest.fixture(scope="module")
def make(
    image: Image, container: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Workshop]:
    """Makes a workshop for one broken image."""
    folder = tmp_path_factory.mktemp("broken")
    # whoever runs the image must reach what is mounted
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o055)

    def workshop(name: str) -> Workshop:
        (folder / name).mkdir()
        return Workshop(image, container, folder / name)

    return workshop


def _health(shop: Workshop, *tries: str) -> dict[str, Any]:
    expression = " or ".join(("static", *dict.fromkeys(one for one in tries if one)))
    words = ("health", "--json", "-", "--tier", "static,import", "-k", expression)
    options = shop.mounts()
    limits = tuple(
        one
        for one in HARDENED
        if "tmpfs" not in one or not any("target=/tmp" in o for o in options)
    )
    done = shop.image.run(*words, options=(*limits, *options), timeout=600)
    assert done.stdout.startswith("{"), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


@pytest.fixture(scope="module")
def reports(make: Callable[[str], Workshop]) -> dict[str, dict[str, Any]]:
    """The report on each broken image; two run at a time."""

    def run(name: str) -> dict[str, Any]:
        shop = make(name)
        for part in _PARTS[name]:
            part.build(shop)
        return _health(shop, *(part.tries for part in _PARTS[name]))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(_PARTS, pool.map(run, _PARTS), strict=True))


def _failed(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in report["checks"] if one["status"] == "failed"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_blamed_on_what_is_broken(
    reports: dict[str, dict[str, Any]], name: str
) -> None:
    broken = BROKEN[name]
    failed = _failed(reports[broken.image])
    assert broken.check in failed, {key: one["detail"] for key, one in failed.items()}
    assert broken.remedy in failed[broken.check]["remedy"]
    for check in (broken.check, *broken.also):
        assert re.search(broken.detail, failed[check]["detail"]), failed[check]["detail"]


@pytest.mark.parametrize("name", _PARTS)
def test_nothing_else_takes_the_blame(reports: dict[str, dict[str, Any]], name: str) -> None:
    report, failed = reports[name], _failed(reports[name])
    blamed = {
        check: [
            pattern
            for part in _PARTS[name]
            if check in (part.check, *part.also)
            for pattern in (part.detail, part.besides)
        ]
        for check in (one["id"] for one in report["checks"])
    }
    assert set(failed) == {check for check, patterns in blamed.items() if patterns}, {
        key: one["detail"] for key, one in failed.items()
    }
    for check, one in failed.items():
        # checks of files say one sentence for each thing that they found
        said = one["detail"].split("; ") if check.startswith("static.") else [one["detail"]]
        for words in said:
            assert any(re.search(pattern, words) for pattern in blamed[check]), (
                f"{check} blames another: {words}"
            )
    assert (report["verdict"], report["exit_code"]) == ("unhealthy", 1)
    # what ran besides was not kept from running
    ran = {one["id"] for one in report["checks"] if one["status"] == "passed"}
    assert len(ran | set(failed)) >= len(report["checks"]) - 1


def test_traps_of_the_environment_are_told_before_they_snap(
    make: Callable[[str], Workshop],
) -> None:
    shop = make("traps")
    _traps(shop)
    failed = _failed(_health(shop, "import.flags", "import.autoload"))
    assert set(failed) == {
        "static.backends", "static.closure", "static.settings", "static.tpu-lock", "import.flags",
        "import.autoload",
    }  # fmt: skip
    said = {name: one["detail"] for name, one in failed.items()}
    assert said["static.backends"] == "other-backend registers other as torch's backend as well"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said["static.settings"]
    assert "libtpu_lockfile was left by" in said["static.tpu-lock"]
    assert "Unknown flag in XLA_FLAGS: --xla_tpu_of_another_program" in said["import.flags"]
    assert "Failed to load the backend extension: other" in said["import.autoload"]
    assert "Unknown command line flag 'no_such_argument'" in said["import.flags"]
    assert "LIBTPU_INIT_ARGS" in failed["import.flags"]["remedy"]

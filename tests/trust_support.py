"""A small image for tests of its attestations: two layers and a half, with all that they look at.

It is laid out as a bake leaves one: a system with two Debian packages, an environment with two
wheels, a program of its own, the lock inside, and a file that a later layer removes.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from reproduce_support import KIND, Layout
from tpuforge.paths import sha256_text

ROOT = Path(__file__).resolve().parents[1]
SITE = "opt/venv/lib/python3.11/site-packages"
DIGESTS = {name: sha256_text(name) for name in ("torch", "torch-tpu", "libtpu", "zlib1g", "mawk")}
STATUS = """Package: zlib1g
Status: install ok installed
Architecture: amd64
Source: zlib
Version: 1:1.2.13.dfsg-1
Depends: mawk | gawk

Package: mawk
Status: install ok installed
Architecture: amd64
Version: 1.3.4-3

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Files: *
License: GPL-2+ or Expat
"""
WHEELS = {
    "torch": ("2.13.0+cpu", "License-Expression: BSD-3-Clause\n"),
    "torch-tpu": ("0.2.0", "License: Apache 2.0\nRequires-Dist: torch>=2\nRequires-Dist: libtpu\n"),
    "libtpu": ("0.0.52", "License: Some Terms of Service\n"),
}


def lock_text(digests: Mapping[str, str] = DIGESTS) -> str:
    """The lock of the image."""
    return "".join(
        f"{name}=={version} \\\n    --hash=sha256:{digests[name]}\n"
        for name, (version, _) in sorted(WHEELS.items())
    )


def files(digests: Mapping[str, str] = DIGESTS) -> tuple[dict[str, str], ...]:
    """The files of each layer; an empty name of a whiteout is one too."""
    system = {
        "var/lib/dpkg/status": STATUS,
        "usr/share/doc/zlib1g/copyright": COPYRIGHT,
        "usr/share/doc/mawk/copyright": "see /usr/share/common-licenses/GPL-2.\n",
        "usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n',
        "usr/local/bin/forgotten": "#!/bin/sh\n",
    }
    environment = {
        "opt/tpuforge/lock.txt": lock_text(digests),
        "opt/tpuforge/image.json": json.dumps({"python": "3.11"}),
        "usr/local/bin/health": "#!/bin/sh\nexit 0\n",
    }
    for name, (version, more) in WHEELS.items():
        folder = f"{SITE}/{name.replace('-', '_')}-{version}.dist-info"
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}\nA text.\n"
        own = {
            f"{folder}/METADATA": text,
            f"{SITE}/{name.replace('-', '_')}/__init__.py": "x = 1\n",
        }
        if name == "torch":
            own[f"{folder}/sboms/own.cdx.json"] = "{}"
            # a package inside another one is not one of the image
            own[f"{SITE}/torch/_vendor/six-1.dist-info/METADATA"] = "Name: six\nVersion: 1\n"
        environment |= own
        environment[f"{folder}/RECORD"] = record(own, f"{folder}/RECORD")
    return system, environment, {"usr/local/bin/.wh.forgotten": ""}


def record(own: Mapping[str, str], path: str) -> str:
    """The RECORD of a distribution in the environment."""
    lines = []
    for name, text in own.items():
        word = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        lines.append(f"{name.removeprefix(f'{SITE}/')},sha256={word.rstrip('=')},{len(text)}\n")
    return "".join([*lines, f"{path.removeprefix(f'{SITE}/')},,\n"])


def labels(digests: Mapping[str, str] = DIGESTS) -> dict[str, str]:
    """The labels of the image."""
    found = {
        "org.opencontainers.image.title": "A toy",
        "org.opencontainers.image.description": "For tests",
        "org.opencontainers.image.version": "1",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.created": "2026-11-30T00:00:00Z",
        "org.opencontainers.image.source": "https://source.example/torch_tpu",
        "org.opencontainers.image.revision": "v0.2.0",
        "org.opencontainers.image.base.name": "debian",
        "org.opencontainers.image.base.digest": f"sha256:{sha256_text('base')}",
        "io.tpuforge.image": "toy",
        "io.tpuforge.python": "3.11",
        "io.tpuforge.flavour": "runtime",
        "io.tpuforge.base.suite": "bookworm",
        "io.tpuforge.lock.sha256": hashlib.sha256(lock_text(digests).encode()).hexdigest(),
        "io.tpuforge.suite.sha256": sha256_text("suite"),
        "io.tpuforge.xla.commit": "a" * 40,
    }
    for name, (version, _) in WHEELS.items():
        found[f"io.tpuforge.{name}.version"] = version
        found[f"io.tpuforge.{name}.wheel.sha256"] = digests[name]
    return found


@dataclass(frozen=True)
class Toy:
    """The image, as ``out/images/toy-py311``.

    Attributes:
        out: The out folder.
        digest: Digest of its manifest.
    """

    out: Path
    digest: str

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.out / "images" / "toy-py311"

    def verb(
        self, name: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a verb about it, as a user would."""
        return verb(self.out, name, *arguments, **variables)

    def about(self, name: str, *arguments: str, code: int = 0, **variables: str) -> dict[str, Any]:
        """Run a verb about this image in this process, for speed; what it left as its result."""
        module = importlib.import_module(f"tpuforge.release.{name}")
        with (
            mock.patch.dict(os.environ, {"TPUFORGE_OUT": str(self.out), **variables}),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            got = module.main(["--image", "toy", "--json", *arguments])
        found = json.loads((self.out / "results" / f"{name}-toy-py311.json").read_bytes())
        assert got == code, found
        assert isinstance(found, dict)
        return found

    def document(self, name: str) -> Any:
        """A document that is attached to it."""
        return json.loads((self.folder / "attestations" / name).read_bytes())


def verb(
    out: Path, name: str, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a verb of the release, or the push of an image, as a user would."""
    module = f"tpuforge.{'images' if name == 'push' else 'release'}.{name}"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TPUFORGE_OUT": str(out), **variables}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**env, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _layer(entries: Mapping[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, text in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
        if "usr/lib/os-release" in entries:
            link = tarfile.TarInfo("etc/os-release")
            link.type, link.linkname = tarfile.SYMTYPE, "../usr/lib/os-release"
            tar.addfile(link)
    return made.getvalue()


def make(
    out: Path,
    *,
    layers: tuple[dict[str, str], ...] | None = None,
    own_labels: Mapping[str, str] | None = None,
    base: bool = True,
    tag: str = "1",
) -> Toy:
    """Lay the image out.

    Args:
        out: The out folder.
        layers: Other files.
        own_labels: Other labels.
        base: Whether the record of its base is there.
        tag: Its tag.
    """
    folder = out / "images" / "toy-py311"
    layout = Layout(folder / "oci")
    told = dict(own_labels if own_labels is not None else labels())
    listed = [layout.blob(_layer(entries), f"{KIND}.layer.v1.tar") for entries in layers or files()]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": told},
        "rootfs": {"type": "layers", "diff_ids": [one["digest"] for one in listed]},
    }
    top = layout.manifest(config, listed)
    layout.finish(top)
    record = {
        "schema": "tpuforge.image/1",
        "image": "toy",
        "python": "3.11",
        "flavour": "runtime",
        "name": f"tpuforge/toy:{tag}",
        "manifest_digest": top["digest"],
        "config_digest": layout.json(config, f"{KIND}.config.v1+json")["digest"],
        "labels": told,
        "inputs": {"the lock": "x"},
        "base_digest": told.get("org.opencontainers.image.base.digest", ""),
        "lock_sha256": told.get("io.tpuforge.lock.sha256", ""),
        "suite_sha256": told.get("io.tpuforge.suite.sha256", ""),
        "engine": {"driver": "docker", "versions": {"engine": "27"}},
        "overlay": None,
    }
    (folder / "image.json").write_text(json.dumps(record))
    if base:
        packages = [
            {"name": "zlib1g", "version": "1:1.2.13.dfsg-1", "arch": "amd64"},
            {"name": "mawk", "version": "1.3.4-3", "arch": "amd64"},
        ]
        (out / "base").mkdir(exist_ok=True)
        (out / "base" / "bookworm.json").write_text(
            json.dumps(
                {
                    "manifest_digest": record["base_digest"],
                    "packages": [{**one, "sha256": DIGESTS[one["name"]]} for one in packages],
                }
            )
        )
    return Toy(out, top["digest"])


def twin(toy: Toy) -> str:
    """Lay its twin with gzip layers beside it, as a bake with ``--gzip`` does; its digest."""
    source, blobs = toy.folder / "oci" / "blobs" / "sha256", toy.folder / "oci-gzip/blobs/sha256"
    blobs.mkdir(parents=True)
    kind = "application/vnd.oci.image"
    body = json.loads((source / toy.digest.removeprefix("sha256:")).read_bytes())

    def keep(data: bytes, what: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"{kind}.{what}", "digest": f"sha256:{digest}", "size": len(data)}

    keep((source / body["config"]["digest"].removeprefix("sha256:")).read_bytes(), "config.v1+json")
    body["layers"] = [
        keep(
            gzip.compress((source / one["digest"].removeprefix("sha256:")).read_bytes(), mtime=0),
            "layer.v1.tar+gzip",
        )
        for one in body["layers"]
    ]
    top = keep(json.dumps(body).encode(), "manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [top]}
    (toy.folder / "oci-gzip" / "index.json").write_text(json.dumps(index))
    path = toy.folder / "image.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "gzip": {"manifest_digest": top["digest"]}}))
    return str(top["digest"])

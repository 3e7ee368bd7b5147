"""The plain way to an image, to measure beside: ``images/plain.Dockerfile`` with the same versions.

Where packages come from is the user's own setting, handed into the build as secrets, so nothing of
it stays in the image.
"""

from __future__ import annotations

import os
import shutil
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge import pip_settings
from tpuforge.errors import ForgeError
from tpuforge.lockfile import Locked
from tpuforge.paths import ROOT, user_path
from tpuforge.process import clean_env, run

DOCKERFILE = ROOT / "images" / "plain.Dockerfile"
NAME = "tpuforge/plain"
_BUILD_S = 3600.0
_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


@dataclass(frozen=True)
class Plain:
    """How the plain way is built here.

    Attributes:
        engine: The record of the engine.
        work: A folder for what goes into the build.
        base: The named context of what it stands on.
        network: The network of the build: ``host`` or ``default``.
    """

    engine: Mapping[str, Any]
    work: Path
    base: str
    network: str

    def settle(self, pip: Path, config: str | None, certificates: str | None) -> None:
        """Put down what every build takes: pip itself, its settings, the certificates.

        Args:
            pip: pip's own wheel.
            config: A pip.conf; the user's own settings if not given.
            certificates: A bundle of certificates; that of the user's settings if not given.

        Raises:
            ForgeError: If one of the files cannot be read.
        """
        text = _read(config) if config is not None else pip_conf(pip_settings.read()).encode()
        bundle = certificates or _bundle()
        for folder in ("tools", "local"):
            (self.work / folder).mkdir(parents=True)
        shutil.copyfile(pip, self.work / "tools" / "pip.whl")
        for name, data in (("pip.conf", text), ("certificates.pem", _read(bundle))):
            path = self.work / name
            path.touch(mode=0o600)
            path.write_bytes(data)

    def ask_for(self, packages: Sequence[Locked], local: Sequence[Path]) -> None:
        """Say what is to be installed.

        Args:
            packages: Names and versions.
            local: Wheels that are at hand, beside those of the index.
        """
        lines = [f"{package.name}=={package.version}\n" for package in packages]
        (self.work / "tools" / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        folder = self.work / "local"
        for old in folder.iterdir():
            old.unlink()
        for path in local:
            shutil.copyfile(path, folder / path.name)

    def build(self, output: Sequence[str], *, no_cache: bool = False) -> float:
        """Build the image.

        Args:
            output: Where it goes, as words for buildx.
            no_cache: Take nothing from the build cache.

        Returns:
            The seconds it took.

        Raises:
            ForgeError: If the build fails.
        """
        words = [self.engine["docker"], "buildx", "build", "--builder", self.engine["builder"]]
        words += ["--progress=plain", "--platform=linux/amd64", "--provenance=false"]
        words += [f"--network={self.network}", f"--file={DOCKERFILE}"]
        if self.network == "host" and self.engine["driver"] != "docker":
            words.append("--allow=network.host")
        words += [f"--build-context=base={self.base}"]
        words += [f"--build-context={name}={self.work / name}" for name in ("tools", "local")]
        words += [f"--secret=id=pip,src={self.work / 'pip.conf'}"]
        words += [f"--secret=id=certificates,src={self.work / 'certificates.pem'}"]
        # the builder takes their values from its environment, and leaves them out of the history
        words += [f"--build-arg={name}" for name in _PROXIES if name in os.environ]
        words += ["--no-cache"] if no_cache else []
        empty = self.work / "empty"
        empty.mkdir(exist_ok=True)
        started = time.monotonic()
        run(
            [*words, *output, empty],
            timeout=_BUILD_S,
            env=clean_env(**self.engine["env"]),
            doing="building the plain way",
            mend="see what pip says; --pip-conf, --ca and --network tell it another way",
        )
        return time.monotonic() - started


def _bundle() -> str:
    """The certificates of the user's settings, or the machine's own, as its OpenSSL knows them."""
    named = pip_settings.read().cert or os.environ.get("SSL_CERT_FILE")
    return str(named or ssl.get_default_verify_paths().cafile or _BUNDLE)


def _read(path: str) -> bytes:
    try:
        return user_path(path).read_bytes()
    except OSError as error:
        raise ForgeError(
            f"{path} cannot be read: {error.strerror}",
            expected="a file that goes into the build as a secret",
            mend="name another with --pip-conf or --ca; or --no-plain",
        ) from error


def pip_conf(settings: pip_settings.PipSettings) -> str:
    """The user's settings as a pip.conf: where packages come from, and nothing else.

    Folders of this machine are left out, since a build does not see them.

    Args:
        settings: The settings.
    """

    def remote(addresses: Sequence[str]) -> list[str]:
        schemes = ("http://", "https://")
        return [address for address in addresses if address.startswith(schemes)]

    values = {
        "index-url": [settings.index_url],
        "extra-index-url": remote(settings.extra_index_urls),
        "find-links": remote(settings.find_links),
        "trusted-host": settings.trusted_hosts,
        "proxy": [settings.proxy] if settings.proxy else [],
        "no-index": ["true"] if settings.no_index else [],
    }
    lines = [f"{name} =\n    " + "\n    ".join(some) for name, some in values.items() if some]
    return "\n".join(["[global]", *lines, ""])

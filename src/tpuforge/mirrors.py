"""Where Debian's packages come from: this machine's mirror, and the snapshot archive beside it.

Of the machine's apt configuration only what says where a mirror is counts, never what to take
from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from tpuforge.errors import ForgeError
from tpuforge.process import run


@dataclass(frozen=True)
class Mirror:
    """Where Debian's packages come from.

    Attributes:
        main: Address of the main archive.
        security: Address of the security archive; empty for none.
        origin: Who named it, for messages.
        options: apt's options for these sources, such as ``check-valid-until=no``.
    """

    main: str
    security: str
    origin: str
    options: str = ""

    def sources(self, suite: str) -> str:
        """The lines of a ``sources.list`` for one suite, its updates and its security fixes.

        Args:
            suite: Code name.
        """
        options = f"[signed-by={keyring()} {self.options}".rstrip() + "]"
        lines = [f"deb {options} {self.main} {name} main" for name in (suite, f"{suite}-updates")]
        if self.security:
            lines.append(f"deb {options} {self.security} {suite}-security main")
        return "\n".join(lines) + "\n"


def keyring() -> Path:
    """Debian's archive keyring on this machine.

    Raises:
        ForgeError: If it is not installed.
    """
    for name in ("debian-archive-keyring.gpg", "debian-archive-keyring.pgp"):
        path = Path("/usr/share/keyrings") / name
        if path.is_file():
            return path
    raise ForgeError(
        "Debian's archive keyring is not installed",
        expected="/usr/share/keyrings/debian-archive-keyring.gpg",
        mend="sudo apt-get install debian-archive-keyring",
    )


def find_mirror() -> Mirror:
    """The Debian mirror of this machine.

    The first that is there: ``TPUFORGE_DEBIAN_MIRROR``, the machine's own apt sources on Debian,
    mmdebstrap's default.

    Raises:
        ForgeError: If none can be found.
    """
    setting = os.environ.get("TPUFORGE_DEBIAN_MIRROR", "").rstrip("/")
    if setting:
        security = os.environ.get("TPUFORGE_DEBIAN_SECURITY_MIRROR")
        if security is None:
            security = f"{setting}-security"
        return Mirror(setting, security.rstrip("/"), "TPUFORGE_DEBIAN_MIRROR")
    release = os_release()
    if release.get("ID") == "debian":
        texts = [
            path.read_text(encoding="utf-8", errors="replace")
            for path in (
                Path("/etc/apt/sources.list"),
                *sorted(Path("/etc/apt/sources.list.d").glob("*.sources")),
                *sorted(Path("/etc/apt/sources.list.d").glob("*.list")),
            )
            if path.is_file()
        ]
        suites = (release.get("VERSION_CODENAME", ""), "stable", "testing")
        found = pick_mirror("\n\n".join(texts), suites, "this machine's apt sources")
        if found is not None:
            return found
    return _default_mirror()


def image_mirror() -> Mirror:
    """The mirror for what goes into images: with security fixes, even if this machine has none.

    Raises:
        ForgeError: If none can be found.
    """
    found = find_mirror()
    if found.security or found.origin == "TPUFORGE_DEBIAN_MIRROR":
        return found
    return replace(found, security=_default_mirror().security)


def os_release() -> dict[str, str]:
    """The machine's ``/etc/os-release``; empty where there is none."""
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {key: value.strip("\"'") for key, _, value in pairs}


def pick_mirror(text: str, suites: Sequence[str], origin: str) -> Mirror | None:
    """The mirror that some apt sources name.

    Args:
        text: Sources in the one-line or the deb822 format, or both.
        suites: Names under which the main archive may be listed, best first.
        origin: Who named it, for messages.

    Returns:
        The mirror, or None if none of the suites is listed with the component ``main``.
    """
    entries = [*_one_line(text), *_deb822(text)]
    for suite in filter(None, suites):
        main = next((uri for uri, name in entries if name == suite), "")
        security = next((uri for uri, name in entries if name == f"{suite}-security"), "")
        if main:
            return Mirror(main, security, origin)
    return None


def _one_line(text: str) -> list[tuple[str, str]]:
    found = []
    for line in text.splitlines():
        form = re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
        if form and "main" in form[3].split("#")[0].split() and not form[1].startswith("cdrom:"):
            found.append((form[1].rstrip("/"), form[2]))
    return found


def _deb822(text: str) -> list[tuple[str, str]]:
    found = []
    for block in re.split(r"\n\s*\n", text):
        fields: dict[str, list[str]] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace():
                fields.setdefault(key, []).extend(line.split())
                continue
            key, _, value = line.partition(":")
            key = key.strip().lower()
            fields[key] = value.split()
        enabled = fields.get("enabled", ["yes"])[0].lower() not in ("no", "false", "0")
        if enabled and "deb" in fields.get("types", []) and "main" in fields.get("components", []):
            found += [
                (uri.rstrip("/"), suite)
                for uri in fields.get("uris", [])
                for suite in fields.get("suites", [])
            ]
    return found


def _default_mirror() -> Mirror:
    """The default of mmdebstrap, shown by a hook that ends the run before anything is fetched."""
    show = 'cat "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* 2>/dev/null; exit 1'
    argv = ["mmdebstrap", "--variant=custom", "--format=null", f"--setup-hook={show}"]
    shown = run(
        [*argv, "stable", os.devnull],
        timeout=60,
        check=False,
        doing="asking mmdebstrap for its default mirror",
        mend="set TPUFORGE_DEBIAN_MIRROR to the address of a Debian mirror",
    )
    found = pick_mirror(shown.output, ("stable",), "mmdebstrap's default")
    if found is None:
        raise ForgeError(
            f"mmdebstrap names no default mirror\n{shown.tail}",
            expected="a Debian mirror",
            mend="set TPUFORGE_DEBIAN_MIRROR to the address of a Debian mirror",
        )
    return found


def snapshot_of(mirror: Mirror, stamp: str) -> Mirror | None:
    """The snapshot archive at one moment.

    ``TPUFORGE_DEBIAN_SNAPSHOT`` names it; else it is the host ``snapshot`` in the domain of the
    mirror, which is right for Debian's own mirrors.

    Args:
        mirror: The mirror of this machine.
        stamp: The moment, such as ``20261130T000000Z``.

    Returns:
        The archive, or None where none can be named.
    """
    setting = os.environ.get("TPUFORGE_DEBIAN_SNAPSHOT", "").rstrip("/")
    if not setting:
        host = urlsplit(mirror.main).hostname or ""
        domain = host.split(".")[-2:]
        if len(domain) < 2 or host.replace(".", "").isdigit():
            return None
        setting = f"{urlsplit(mirror.main).scheme}://snapshot.{'.'.join(domain)}"
    return Mirror(
        f"{setting}/archive/debian/{stamp}",
        f"{setting}/archive/debian-security/{stamp}",
        "the snapshot archive",
        "check-valid-until=no",
    )

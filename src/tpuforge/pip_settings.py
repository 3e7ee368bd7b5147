"""The user's pip configuration: where packages are, and how they are reached.

pip itself is asked, in a subprocess, because its own parser knows its files, its variables, their
order and its defaults. The option parser is not a public interface of pip: 22.2 to 26.3 have it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.process import clean_env, run

# hex, because a credential in an address must come through the redaction of output unharmed
_ASK = """
import json
from pip._internal.commands import create_command
options, _ = create_command("install").parse_args([])
kept = ("index_url", "extra_index_urls", "find_links", "no_index", "cert", "client_cert", "proxy",
        "trusted_hosts")
found = {name: getattr(options, name) for name in kept}
meddling = {
    "constraint": options.constraints,
    "extra-index-url": options.extra_index_urls,
    "find-links": options.find_links,
    "no-binary": options.format_control.no_binary,
    "only-binary": options.format_control.only_binary,
    "pre": getattr(options, "pre", False),
    "prefer-binary": options.prefer_binary,
    "requirement": options.requirements,
    "uploaded-prior-to": getattr(options, "uploaded_prior_to", None),
}
found["meddling"] = sorted(name for name, value in meddling.items() if value)
print(json.dumps(found).encode().hex())
"""
# what pip reads to find its settings, beside its own variables
_PLACES = ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS")


@dataclass(frozen=True)
class PipSettings:
    """What pip would use, from its files and variables.

    Attributes:
        index_url: The index: the user's, or pip's own default. May hold credentials.
        extra_index_urls: More indexes, in the user's order.
        find_links: Directories, pages and addresses that hold wheels.
        no_index: Whether no index is to be asked at all.
        cert: A bundle of certificates, or None.
        client_cert: A client's certificate, or None.
        proxy: The proxy's address, or None.
        trusted_hosts: Hosts whose certificate is not checked.
        meddling: Names of the settings that are made and can change *what* pip resolves.
    """

    index_url: str
    extra_index_urls: tuple[str, ...]
    find_links: tuple[str, ...]
    no_index: bool
    cert: str | None
    client_cert: str | None
    proxy: str | None
    trusted_hosts: tuple[str, ...]
    meddling: tuple[str, ...]


def read(python: Path | None = None) -> PipSettings:
    """Ask a pip for its settings, the user's environment included.

    Args:
        python: A Python with pip; the running one if not given.

    Returns:
        The settings.

    Raises:
        ForgeError: If pip cannot read its own configuration.
    """
    env = clean_env()
    if "PIP_CONFIG_FILE" not in os.environ:
        del env["PIP_CONFIG_FILE"]
    env |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name in _PLACES
    }
    done = run(
        [python or sys.executable, "-I", "-c", _ASK],
        timeout=60,
        env=env,
        doing="asking pip for its settings",
        mend="mend what pip config debug shows, or set PIP_CONFIG_FILE=/dev/null",
    )
    found: dict[str, Any] = json.loads(bytes.fromhex(done.output.split()[-1]))
    return PipSettings(
        index_url=found["index_url"],
        extra_index_urls=tuple(found["extra_index_urls"]),
        find_links=tuple(found["find_links"]),
        no_index=bool(found["no_index"]),
        cert=found["cert"] or None,
        client_cert=found["client_cert"] or None,
        proxy=found["proxy"] or None,
        trusted_hosts=tuple(found["trusted_hosts"]),
        meddling=tuple(found["meddling"]),
    )

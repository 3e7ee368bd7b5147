"""Where packages come from: what of the user's pip configuration counts, and what does not.

The user says *where*: one index, and how to reach it. Everything that could change *what* is
resolved is left out, because it has: an extra index that offers a higher version of a package
wins over the real one (dependency confusion), and a constraint or a folder of wheels changes a
lock without a trace in it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpuforge import pip_settings
from tpuforge.errors import Exit, ForgeError
from tpuforge.process import Completed, clean_env, redact, run

_UNREACHABLE = re.compile(
    r"Retrying \(|\bConnectionError|NewConnectionError|ConnectTimeout|ReadTimeout|Max retries"
    r"|Temporary failure in name resolution|Name or service not known|Connection refused"
    r"|error sending request|dns error|operation timed out|SSLError|HTTP status server error"
    r"|CERTIFICATE_VERIFY_FAILED|(?:40[137]|429|50\d) (?:Client|Server) Error",
)

WRONG = {
    "other bytes": (
        "serves other bytes than it lists:\n",
        "files with the listed SHA-256",
        "do not use this index; tell those who run it",
        Exit.FAULT,
    ),
    "unreachable": (
        "cannot be reached: ",
        "an index that answers",
        "check the network and pip's settings: pip config list",
        Exit.CANNOT,
    ),
    "no upload times": (
        "does not say when its files were uploaded:\n",
        "upload times (PEP 700): without them the cutoff cannot be kept",
        "use an index that gives them: pip config list",
        Exit.CANNOT,
    ),
    "no digests": (
        "gives ",
        "an index that lists digests",
        "use another index: pip config list",
        Exit.FAULT,
    ),
    "no pages": (
        "cannot be asked about its files:\n",
        "the simple repository API in JSON (PEP 691)",
        "use an index that has it: pip config list",
        Exit.CANNOT,
    ),
    "missing": (
        "lists a file that is not there:\n",
        "every listed file",
        "try later, or another index: pip config list",
        Exit.CANNOT,
    ),
}
"""What an index can get wrong, the worst first: what it does, what is expected, what mends it."""


class UnreachableError(ForgeError):
    """The index did not answer, or not in a way that can be used."""


@dataclass(frozen=True)
class Source:
    """Where packages come from.

    Attributes:
        index: The one index: the user's, or pip's own default.
        reach: Variables that say how to reach it: certificates, proxy, trusted hosts.
        folders: Local folders of wheels that the user named; read to compare, never to resolve.
        ignored: Settings of pip that were left out, by name.
        forbidden: Whether the user told pip to use no index at all.
    """

    index: str
    reach: dict[str, str] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    ignored: tuple[str, ...] = ()
    forbidden: bool = False

    @property
    def name(self) -> str:
        """The index for people, without credentials."""
        return f"the package index {redact(self.index)}"

    def env(self) -> dict[str, str]:
        """The whole environment of a resolver: clean, with this one index in it."""
        extra = dict(self.reach)
        extra |= {"PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "15"}
        extra |= {"UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": "15"}
        extra |= {"UV_SYSTEM_CERTS": "1"}
        if "PIP_CERT" in extra:
            extra["SSL_CERT_FILE"] = extra["PIP_CERT"]
        if "PIP_CLIENT_CERT" in extra:
            extra["SSL_CLIENT_CERT"] = extra["PIP_CLIENT_CERT"]
        if "PIP_PROXY" in extra:
            extra |= {"HTTPS_PROXY": extra["PIP_PROXY"], "HTTP_PROXY": extra["PIP_PROXY"]}
        if "PIP_TRUSTED_HOST" in extra:
            extra["UV_INSECURE_HOST"] = extra["PIP_TRUSTED_HOST"]
        # by variable, not by argument: arguments can be read by every user of the machine
        extra |= {"PIP_INDEX_URL": self.index, "UV_DEFAULT_INDEX": self.index}
        return clean_env(**extra)

    def run(
        self,
        words: Sequence[str | Path],
        timeout: float,
        work: Path,
        stop: threading.Event | None = None,
    ) -> Completed:
        """Run a program that asks the index, in an environment that holds this one index.

        Args:
            words: Program and arguments.
            timeout: Seconds.
            work: The child's folder.
            stop: Ends it when it is set.
        """
        return run(words, timeout=timeout, env=self.env(), cwd=work, check=False, stop=stop)

    def no_index(self) -> UnreachableError:
        """What to raise where the user told pip to use no index at all."""
        return UnreachableError(
            "pip is configured to use no index (no-index)",
            expected="an index to resolve from",
            mend="unset PIP_NO_INDEX or no-index in pip's configuration: pip config list",
        )

    def refuse(self, output: str) -> None:
        """Raise if the output of a resolver says that the index could not be reached.

        Args:
            output: What pip, pip-compile or uv printed.

        Raises:
            UnreachableError: If so.
        """
        if not _UNREACHABLE.search(output):
            return
        last = next((line for line in output.splitlines() if _UNREACHABLE.search(line)), "")
        raise self.wrong("unreachable", last.strip()[:300])

    def wrong(self, kind: str, what: str) -> ForgeError:
        """What to raise where the index got something wrong.

        Args:
            kind: A key of :data:`WRONG`.
            what: The words of whoever saw it.
        """
        does, expected, mend, code = WRONG[kind]
        made = UnreachableError if kind == "unreachable" else ForgeError
        return made(f"{self.name} {does}{what}", expected=expected, mend=mend, exit_code=code)


def read_source(python: Path) -> Source:
    """Read the user's pip configuration, environment included, through pip itself.

    Args:
        python: A Python with pip.

    Raises:
        ForgeError: If pip cannot read its configuration.
    """
    pip = pip_settings.read(python)
    reach = {
        "PIP_CERT": pip.cert,
        "PIP_CLIENT_CERT": pip.client_cert,
        "PIP_PROXY": pip.proxy,
        "PIP_TRUSTED_HOST": " ".join(pip.trusted_hosts),
    }
    folders = (Path(link.removeprefix("file://")) for link in pip.find_links)
    return Source(
        index=pip.index_url,
        reach={name: value for name, value in reach.items() if value},
        folders=tuple(folder for folder in folders if folder.is_dir()),
        ignored=pip.meddling,
        forbidden=pip.no_index,
    )

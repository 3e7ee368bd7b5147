"""How a wheel came to be: an in-toto statement with SLSA provenance, beside the wheel.

The statement (``<wheel>.intoto.json``, format in ``docs/statement.md``) names the wheel by its
digest and says from which commit, with which tools and by which command line it was made. It is
meant to be published, so it holds no credential: addresses lose user, password, query and
fragment, remote services their path too; of the environment only the names of its variables are
told; and whatever a variable with the name of a secret holds is blotted out wherever it appears.

Facts: in-toto Attestation Framework, Statement v1 and ResourceDescriptor v1; SLSA, build provenance
v1.
"""

from __future__ import annotations

import json
import os
import re
import urllib.parse
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tpuforge import __version__
from tpuforge.disclosure import ADDRESS, HIDDEN, SECRET_NAME, blot, given, secrets
from tpuforge.paths import write_json
from tpuforge.process import redact

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "pkg:generic/tpuforge?format=build_wheel-1#docs/statement.md"
"""What the fields of the build definition mean: a package URL of this project's own page."""

_VARIABLE = re.compile(r"[\w.-]+")
_ENVIRONMENT_OPTIONS = ("action_env", "client_env", "host_action_env", "repo_env", "test_env")
# what upstream documents for these options; the values decide what is built
_TOLD_VARIABLES = ("HERMETIC_PYTHON_VERSION", "WHEEL_VERSION_EXTRAS")
_SERVICE_OPTIONS = ("remote_", "experimental_remote_", "bes_")


@dataclass(frozen=True)
class Source:
    """The source that a wheel was built from.

    Attributes:
        repository: Its git address.
        ref: Tag, branch or commit that was asked for; None for a folder of the user's own.
        commit: The commit, 40 hex digits; None for a folder that is no git checkout.
        dirty: Whether files differed from that commit.
        tree_sha256: Digest of the files themselves, for a source that no commit tells.
    """

    repository: str
    ref: str | None
    commit: str | None
    dirty: bool = False
    tree_sha256: str | None = None


@dataclass(frozen=True)
class Material:
    """Something that the build used and that a digest names.

    Attributes:
        name: What it is, such as ``bazelisk``.
        sha256: Its digest, 64 hex digits.
        version: Its release, if it tells one.
        uri: Where it comes from, such as a package URL; None for a file of the user's own.
    """

    name: str
    sha256: str
    version: str | None = None
    uri: str | None = None


@dataclass(frozen=True)
class Build:
    """Everything that the statement tells.

    Attributes:
        wheel: File name of the wheel.
        sha256: Its digest.
        source: What it was built from.
        python: ``X.Y`` that it is for.
        configs: Bazel's configurations, in their order.
        remote: Kind of remote service: ``none``, ``cache``, ``executor`` or ``public-cache``.
        line: The command, word by word.
        materials: Bazelisk and Bazel.
        started: When the build began.
        finished: When it ended. With the time of the source for both, the statement depends on
            nothing but the build.
        target: Bazel's label.
        remote_url: Address of the remote service; only its scheme, host and port are told.
        suffix: Development suffix of the wheel's version; None for a release.
        epoch: Time of the wheel's members, seconds since 1970.
        environment: The variables that Bazel got; only their names are told.
        folders: Name to folder, such as ``$SOURCE``: the folder is told by its name.
        image: Digest of the builder image (``sha256:…``); None for a build on the host.
        made_sha256: Digest of the wheel as Bazel made it, before it was normalised.
    """

    wheel: str
    sha256: str
    source: Source
    python: str
    configs: Sequence[str]
    remote: str
    line: Sequence[str]
    materials: Sequence[Material]
    started: datetime
    finished: datetime
    target: str
    remote_url: str | None = None
    suffix: str | None = None
    epoch: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    image: str | None = None
    made_sha256: str | None = None


def path_for(wheel: Path) -> Path:
    """Where the statement of a wheel stands.

    Args:
        wheel: A wheel.
    """
    return wheel.with_name(f"{wheel.name}.intoto.json")


def write(path: Path, build: Build) -> None:
    """Write the statement of a build, all or nothing.

    Args:
        path: Where it goes, see :func:`path_for`.
        build: What it tells.

    Raises:
        OSError: If it cannot be written.
    """
    write_json(path, statement(build))


def statement(build: Build) -> dict[str, Any]:
    """The statement of a build.

    Args:
        build: What it tells.

    Returns:
        A JSON object: the same one for the same build and the same two times.
    """
    source = build.source
    parameters = {
        "source": given(
            {
                "repository": public_address(source.repository),
                "ref": source.ref,
                "dirty": source.dirty,
            }
        ),
        "target": build.target,
        "python": build.python,
        "configs": list(build.configs),
        "remote": given(
            {
                "kind": build.remote,
                "service": _service(build.remote_url) if build.remote_url else None,
            }
        ),
        "suffix": build.suffix,
    }
    internal = {
        "command": public_line(build.line, build.folders),
        "environment": sorted(build.environment),
        "sourceDateEpoch": build.epoch,
    }
    run = {
        "builder": {
            "id": f"pkg:generic/tpuforge#build_wheel/{'image' if build.image else 'host'}",
            "version": {"tpuforge": __version__},
        },
        "byproducts": [
            {"name": "the wheel as Bazel made it", "digest": {"sha256": build.made_sha256}}
        ]
        if build.made_sha256
        else None,
    }
    predicate = {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": given(parameters),
            "internalParameters": given(internal),
            "resolvedDependencies": _dependencies(build),
        },
        "runDetails": given(run),
    }
    hidden = secrets(os.environ) | secrets(build.environment)
    made: dict[str, Any] = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": build.wheel, "digest": {"sha256": build.sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": blot(predicate, sorted(hidden, key=len, reverse=True)),
    }
    metadata = {"startedOn": _moment(build.started), "finishedOn": _moment(build.finished)}
    # the id of this run follows from all that is told of it
    told = json.dumps([made, metadata], sort_keys=True, ensure_ascii=False)
    invocation = str(uuid.uuid5(uuid.NAMESPACE_URL, told))
    made["predicate"]["runDetails"]["metadata"] = {"invocationId": invocation, **metadata}
    return made


def public_address(address: str) -> str:
    """An address without user, password, query and fragment.

    Args:
        address: A URL, or a path.
    """
    return ADDRESS.sub(lambda found: _stripped(found[0]), redact(address))


def public_line(line: Iterable[str], folders: Mapping[str, Path] | None = None) -> list[str]:
    """A Bazel command without what is private in it.

    Args:
        line: Its words.
        folders: Name to folder: where the folder stands in a word, its name is put.

    Returns:
        The same words; the values of headers, keys, credentials and of variables that nobody
        needs to know are ``***``, addresses are stripped.
    """
    # the longest first: a folder may hold another
    named = [(name, str(folder)) for name, folder in (folders or {}).items() if folder.name]
    named.sort(key=lambda item: len(item[1]), reverse=True)
    words: list[str] = []
    option = ""
    for word in line:
        name, equals, value = word.removeprefix("--").partition("=")
        if option and not word.startswith(("--", "//")):
            shown = _value(option, word)
            option = ""
        elif word.startswith("--") and equals:
            shown = f"--{name}={_value(name, value)}"
            option = ""
        else:
            option = name if word.startswith("--") else ""
            shown = public_address(word)
        for folder_name, folder in named:
            shown = re.sub(rf"(?<!\w){re.escape(folder)}(?=/|$)", folder_name, shown)
        words.append(shown)
    return words


def _value(option: str, value: str) -> str:
    """The value of an option, as far as others may know it."""
    variable, equals, _ = value.partition("=")
    # an address may have an = in its query
    named = bool(equals) and _VARIABLE.fullmatch(variable) is not None
    hidden = f"{variable}={HIDDEN}" if named else HIDDEN
    if option.endswith("_header"):
        return hidden
    if option in _ENVIRONMENT_OPTIONS and equals:
        return value if variable in _TOLD_VARIABLES else hidden
    if SECRET_NAME.search(option) or (named and SECRET_NAME.search(variable)):
        return hidden
    if option.startswith(_SERVICE_OPTIONS):
        return _service(value)
    return public_address(value)


def _service(address: str) -> str:
    """Scheme, host and port: a cache's path may be its password."""
    if "://" not in address:
        # Bazel takes host:port as well
        return redact(address).rpartition("@")[2].partition("/")[0]
    scheme, _, rest = _stripped(address).partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _stripped(address: str) -> str:
    try:
        parts = urllib.parse.urlsplit(redact(address))
    except ValueError:
        return f"{address.partition('://')[0]}://{HIDDEN}"
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _dependencies(build: Build) -> list[dict[str, Any]]:
    source = build.source
    repository = public_address(source.repository)
    digest = given({"gitCommit": source.commit, "sha256": source.tree_sha256})
    uri = f"git+{repository}@{source.commit}" if source.commit else f"git+{repository}"
    found: list[dict[str, Any]] = [
        given(
            {
                "name": "source",
                "uri": uri,
                "digest": digest or None,
                "annotations": {"dirty": True} if source.dirty else None,
            }
        )
    ]
    for material in build.materials:
        found.append(
            given(
                {
                    "name": material.name,
                    "uri": material.uri and public_address(material.uri),
                    "digest": {"sha256": material.sha256},
                    "annotations": {"version": material.version} if material.version else None,
                }
            )
        )
    if build.image:
        found.append({"name": "builder image", "digest": _image_digest(build.image)})
    return found


def _image_digest(image: str) -> dict[str, str]:
    algorithm, _, value = image.rpartition("@")[2].partition(":")
    return {algorithm: value}


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")

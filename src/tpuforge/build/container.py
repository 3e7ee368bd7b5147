"""A build in the builder image: the same place on every host.

The line is the one that would run on the host. The source and the folder of the caches are mounted
at their own paths, so every path in it, in Bazel's build events and in its links means the same
inside and outside. The container has no rights, belongs to the user who asked, and takes Bazel's
server with it when it ends. Its root is read-only: what a build may write to is what is mounted.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import ROOT, out_dir, read_json, sha256_text
from tpuforge.process import clean_env, run, undisturbed

IMAGE = "builder"
BAZELISK = "bazelisk"
"""The Bazelisk of the image; it has the pinned digest, which was checked as it was baked."""

_LABEL = "io.tpuforge.build"
_BAKE_S = 1800.0
_ASK_S = 60.0
_GRACE_S = 60.0
# Bazel's server is given this long to end by itself; the container's end would cut it short
_STOP_S = 10
# which engine, which folders, and how npm reaches its registry: the user's own choices
_PASSED_ON = ("DOCKER_", "TPUFORGE_", "NODE_EXTRA_CA_CERTS")
# of the host's environment, what has another meaning inside
_HOSTS_OWN = ("HOME", "PATH", "USER", "LOGNAME", "TMPDIR")
# variables whose values are paths of this host
_PATHS = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    "USE_BAZEL_VERSION",
)
# where distributions keep the certificates that this machine trusts, and where the image does
_BUNDLES = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/ca-bundle.pem"),
)
_BUNDLE = _BUNDLES[0]


@dataclass(frozen=True)
class Builder:
    """The builder image in an engine.

    Attributes:
        docker: The client.
        env: How it reaches the engine, such as ``DOCKER_HOST``.
        init: Whether the engine has an init process for containers.
        name: Name and tag of the image.
        digest: What it is run by: its manifest, or its configuration in a classic image store.
        user: ``uid:gid`` that files of the caller belong to inside.
    """

    docker: str
    env: Mapping[str, str]
    init: bool
    name: str
    digest: str
    user: str

    @property
    def client(self) -> list[str]:
        """The client's own words, so that a line reaches the engine without any variable."""
        if "DOCKER_CONTEXT" in self.env:
            return [self.docker, "--context", self.env["DOCKER_CONTEXT"]]
        return [
            self.docker,
            *(["-H", self.env["DOCKER_HOST"]] if "DOCKER_HOST" in self.env else []),
        ]


def find_builder(progress: Progress) -> Builder:
    """Have the builder image in an engine; it is baked if it is not there or is stale.

    Args:
        progress: Told what happens.

    Raises:
        ForgeError: If there is no engine, no image, or the engine is on another machine.
    """
    with progress.step("having the builder image"):
        passed = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_PASSED_ON) or name.lower().startswith("npm_config_")
        }
        done = run(
            [sys.executable, "-m", "tpuforge.images.bake", "--image", IMAGE, "--json"],
            timeout=_BAKE_S,
            env=clean_env(PYTHONPATH=str(ROOT / "src"), **passed),
            check=False,
            on_line=progress.detail,
            doing="baking the builder image",
        )
    if done.code != 0:
        error = _error_in(done.output)
        raise ForgeError(
            f"there is no builder image to build in: {error.get('found') or done.tail}",
            expected=error.get("expected") or "an engine that holds it",
            mend=f"{error.get('mend') or './forge bake --image builder'}; or build on this host: "
            "--where host",
            exit_code=Exit(done.code) if done.code in set(Exit) else Exit.CANNOT,
        )
    return _builder()


def known() -> Builder | None:
    """The builder image, if an engine has it already; nothing is baked."""
    try:
        return _builder()
    except ForgeError:
        return None


def _builder() -> Builder:
    """The builder as the records of engine and image tell it."""
    engine = read_json(out_dir() / "engine" / "engine.json")
    image = read_json(out_dir() / "images" / IMAGE / "image.json")
    try:
        docker, host = str(engine["docker"]), str(engine["docker_host"])
        env = {str(name): str(value) for name, value in engine["env"].items()}
        init, name = bool(engine["init"]), str(image["name"])
        digests = (str(image["manifest_digest"]), str(image["config_digest"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ForgeError(
            f"the record of the engine or of the builder image is damaged: {error}",
            expected="out/engine/engine.json and out/images/builder/image.json, whole",
            mend="rm -r out/images/builder, then: ./forge bake --image builder",
        ) from error
    if not host.startswith("unix://"):
        raise ForgeError(
            f"the engine at {host} cannot see this machine's folders",
            expected="an engine on this machine, since the source and the caches are mounted",
            mend="build on this host (--where host), or run it where the engine is",
        )
    held = ["image", "inspect", "--format", "{{.Id}}", name]
    found = run([docker, *held], timeout=_ASK_S, env=clean_env(**env), check=False)
    digest = next((one for one in digests if one in found.output.split()), None)
    if found.code != 0 or digest is None:
        raise ForgeError(
            f"the engine does not hold {name} with the digest {digests[0]}\n{found.tail}",
            expected="the image that image.json names, bit for bit",
            mend="./forge bake --image builder",
            exit_code=Exit.FAULT,
        )
    return Builder(docker, env, init, name, digest, _user(docker, env))


def _user(docker: str, env: Mapping[str, str]) -> str:
    """Who the caller is inside: itself, or root where root inside is the caller outside."""
    asked = [docker, "info", "--format", "{{json .SecurityOptions}}"]
    done = run(asked, timeout=_ASK_S, env=clean_env(**env), check=False)
    return "0:0" if "name=rootless" in done.output else f"{os.getuid()}:{os.getgid()}"


def _error_in(output: str) -> dict[str, str]:
    """The error of a verb that was asked for JSON; its output may hold other lines as well."""
    with contextlib.suppress(ValueError):
        record = json.loads(output[output.index("{") : output.rindex("}") + 1])
        error: dict[str, Any] = record.get("error") or {}
        return {key: str(value) for key, value in error.items()}
    return {}


def command(
    builder: Builder,
    line: Sequence[str],
    *,
    name: str,
    source: Path,
    work: Path,
    env: Mapping[str, str],
    limit_s: float,
    files: Sequence[Path] = (),
) -> list[str]:
    """The line that runs a Bazelisk line in the builder image.

    Args:
        builder: The image.
        line: Bazelisk and its arguments, as on the host; the image's own Bazelisk takes its place.
        name: What the container is to be called (:func:`running` gives one).
        source: The workspace. It can be written to: Bazel puts its links and its lock file there.
        work: Folder for everything that Bazel keeps.
        env: Bazel's environment on the host. Values that are the user's own, such as a proxy with
            its password, are handed over by name, so they stand in no line.
        limit_s: Seconds that the build may take. Its caller ends it then; a minute later the
            container ends by itself, in case the caller is no longer there.
        files: Further files that the line names, such as credentials; they are mounted read-only,
            and so are those that ``env`` names: certificates, a Bazel.

    Returns:
        The words; their environment is ``env`` with that of the builder.
    """
    inside = {key: value for key, value in env.items() if key not in _HOSTS_OWN}
    inside["HOME"] = str(work / "home")
    named = [Path(env[key]) for key in _PATHS if Path(env.get(key, "")).is_absolute()]
    words = [*builder.client, "run", "--rm", f"--name={name}", f"--label={_LABEL}={_key(work)}"]
    words += ["--init"] if builder.init else []
    # a build fetches what it is made of, and its caches may be on the loopback
    words += ["--network=host", f"--user={builder.user}"]
    words += ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only"]
    # on disk, unlike a tmpfs, and gone with the container
    words += ["--mount", "type=volume,target=/tmp"]
    mounted: list[Path] = []
    for folder in (source, work):
        words += ["--mount", _mount(folder, folder, writable=True)]
        mounted.append(folder)
    bundle = next((path for path in _BUNDLES if path.is_file()), _BUNDLE)
    read_only = [(path, path) for path in (*named, *files)] + [(bundle, _BUNDLE)]
    for outside, inside_path in read_only:
        # what lies in a folder that is there already needs no mount of its own
        if outside.exists() and not any(inside_path.is_relative_to(path) for path in mounted):
            words += ["--mount", _mount(outside, inside_path, writable=False)]
            mounted.append(inside_path)
    for key, value in sorted(inside.items()):
        words += ["--env", key if os.environ.get(key) == value else f"{key}={value}"]
    words += ["--workdir", str(source), builder.digest]
    # its signals go to its whole group: to Bazelisk alone they would be swallowed
    limit = f"{limit_s + _GRACE_S:.0f}"
    return [*words, "timeout", "--kill-after=30", limit, BAZELISK, *line[1:]]


@contextlib.contextmanager
def running(builder: Builder, work: Path) -> Iterator[str]:
    """A name for the container of one build; nothing of that name is left when the block ends.

    What a killed run left behind is ended first. The caller holds the lock of the work folder.

    Args:
        builder: The image.
        work: Folder for everything that Bazel keeps.

    Yields:
        The name.
    """
    mark = f"label={_LABEL}={_key(work)}"
    left = _call(builder, "ps", "--all", "--quiet", "--filter", mark).split()
    for container in left:
        _end(builder, container)
    name = f"tpuforge-build-{secrets.token_hex(4)}"
    try:
        yield name
    finally:
        with undisturbed():
            _end(builder, name)


def _end(builder: Builder, container: str) -> None:
    """End a container that may be there, first by TERM so that Bazel can end its own work."""
    _call(builder, "stop", f"--time={_STOP_S}", container)
    _call(builder, "rm", "--force", "--volumes", container)


def _call(builder: Builder, *words: str) -> str:
    """Ask the engine for something that may be in vain; an engine that is gone has nothing left."""
    try:
        done = run(
            [builder.docker, *words],
            timeout=_ASK_S,
            env=clean_env(**builder.env),
            check=False,
            doing=f"docker {words[0]}",
        )
    except ForgeError:
        return ""
    return done.output if done.code == 0 else ""


def _key(work: Path) -> str:
    """What containers of one work folder are labelled with; the folder may have any name."""
    return sha256_text(str(work))[:16]


def _mount(source: Path, target: Path, *, writable: bool) -> str:
    """The value of ``--mount``: a line of CSV, so any character can stand in a path."""
    fields = ["type=bind", f"source={source}", f"target={target}"]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields if writable else [*fields, "readonly"])
    return line.getvalue()

"""Find a Docker engine that can bake, or set up a private one.

A bake needs a daemon that answers, buildx 0.13 and BuildKit 0.13 or newer (named contexts from OCI
layouts, OCI export as a folder), and a builder that can export OCI layouts: the containerd image
store, or a builder of the docker-container kind. ``docs/engine.md`` tells more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuforge.console import Progress
from tpuforge.errors import ForgeError
from tpuforge.host import can_install, which
from tpuforge.images import daemon
from tpuforge.paths import exclusive, home, out_dir, read_json, write_json
from tpuforge.process import Completed, clean_env, run
from tpuforge.records import read_record
from tpuforge.verb import Outcome, parser, run_verb

SCHEMA = "tpuforge.engine/1"
OLDEST = (0, 13)
"""The oldest buildx and BuildKit with ``oci-layout://`` contexts and ``tar=false`` exports."""

_DEFAULT_HOST = "unix:///var/run/docker.sock"
_CONTAINERD = "io.containerd.snapshotter.v1"
_ASK_S = 30.0
_FORMAT = (
    '{"server":{{json .ServerVersion}},"driver":{{json .DriverStatus}},"init":{{json .InitBinary}},'
    '"os":{{json .OSType}},"machine":{{json .Architecture}},'
    '"plugins":{{json .ClientInfo.Plugins}}}'
)
_CREATE = "docker buildx create --name tpuforge --driver docker-container --bootstrap"
_OTHER = f"{_CREATE}; or, as root: ./forge engine --private"


@dataclass(frozen=True)
class Target:
    """A Docker to look at.

    Attributes:
        env: The variables that lead the client there.
        host: Its address, for people.
        builder: The builder that stands for the daemon's own BuildKit.
        named_by: The user's setting that names it; empty for Docker's default.
    """

    env: Mapping[str, str]
    host: str
    builder: str = "default"
    named_by: str = ""


def record_path() -> Path:
    """Where the record of the engine stands."""
    return out_dir() / "engine" / "engine.json"


def recorded() -> dict[str, Any] | None:
    """The record of the engine of before; one that is not whole counts as missing."""
    form = {"docker_host": str, "env": dict, "private": bool, "versions": dict}
    return read_record(record_path(), SCHEMA, form)


def _ask(docker: str, env: Mapping[str, str], *words: str) -> Completed:
    """Ask the client something that takes it a moment; its exit code is the caller's to judge."""
    try:
        return run([docker, *words], timeout=_ASK_S, env=env, check=False)
    except ForgeError as error:
        # the program is there and no exit code is an error, so it overran its time
        raise ForgeError(
            f"the Docker client does not answer within {_ASK_S:.0f} s",
            expected=f"an answer to docker {words[0]}",
            mend="docker version",
        ) from error


def version_of(text: str) -> tuple[int, ...]:
    """The numbers at the start of a version.

    Args:
        text: Such as ``v0.13.1+ds1`` or ``26.1.5+dfsg1``.

    Returns:
        Such as ``(0, 13, 1)``; empty if there are none.
    """
    form = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in form[1].split(".")) if form else ()


def _client_folder() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or (home() or Path("/")) / ".docker")


def _folders() -> dict[str, str]:
    """The variables that tell the client and buildx where their own files are."""
    kept = ("DOCKER_CONFIG", "BUILDX_CONFIG")
    found = {name: os.environ[name] for name in kept if os.environ.get(name)}
    if "BUILDX_CONFIG" not in found and not _can_be_made(_client_folder() / "buildx"):
        # a user whose home folder is missing, or not theirs: buildx does nothing without a folder
        found["BUILDX_CONFIG"] = str(out_dir() / "engine" / "buildx")
    return found


def _can_be_made(folder: Path) -> bool:
    """Whether a folder is there and can be written, or could be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def user_target(docker: str) -> Target:
    """The Docker that the user's settings name, in the order in which Docker reads them.

    Args:
        docker: The client.

    Raises:
        ForgeError: If a context is named that does not exist.
    """
    kept = _folders()
    host = os.environ.get("DOCKER_HOST", "")
    if host:
        tls = ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
        kept |= {name: os.environ[name] for name in tls if os.environ.get(name)}
        return Target({**kept, "DOCKER_HOST": host}, host, named_by="DOCKER_HOST")
    context, named_by = os.environ.get("DOCKER_CONTEXT", ""), "DOCKER_CONTEXT"
    if not context:
        path = _client_folder() / "config.json"
        config = read_json(path)
        context = config.get("currentContext", "") if isinstance(config, dict) else ""
        named_by = f"{path}"
    if context in ("", "default"):
        return Target({**kept, "DOCKER_HOST": _DEFAULT_HOST}, _DEFAULT_HOST)
    asked = ["context", "inspect", context, "--format", "{{.Endpoints.docker.Host}}"]
    shown = _ask(docker, clean_env(**kept), *asked)
    if shown.code != 0:
        raise ForgeError(
            f"the Docker context {context!r}, named by {named_by}, is not there\n{shown.tail}",
            expected="a context that docker context ls lists",
            mend="docker context use default",
        )
    host = shown.output.strip().splitlines()[-1]
    if host.startswith("unix://"):
        return Target({**kept, "DOCKER_HOST": host}, host, named_by=named_by)
    # certificates belong to the context, so the client must be led there by its name
    return Target({**kept, "DOCKER_CONTEXT": context}, host, builder=context, named_by=named_by)


def probe(docker: str, target: Target, builder: str | None = None) -> dict[str, Any]:
    """Look at a Docker and judge whether it can bake.

    Args:
        docker: The client.
        target: Where to look.
        builder: The builder to use; chosen if not given.

    Returns:
        The record for ``engine.json``, without ``private`` and ``pid``.

    Raises:
        ForgeError: If the daemon does not answer, or something is missing: all of it, each with
            its remedy; exit code 2.
    """
    env = clean_env(**target.env)
    done = _ask(docker, env, "info", "--format", _FORMAT)
    facts = _json_line(done.output)
    if not facts.get("server"):
        raise _silent(target, done.output)
    plugins = {plugin.get("Name"): plugin for plugin in facts.get("plugins") or []}
    buildx = plugins.get("buildx", {}).get("Version", "")
    missing: list[tuple[str, str]] = []
    if (facts["os"], facts["machine"]) not in (("linux", "x86_64"), ("linux", "amd64")):
        missing.append(
            (
                f"the daemon runs on {facts['os']}/{facts['machine']}",
                "use a Docker on linux/amd64: TorchTPU has wheels for nothing else",
            )
        )
    if not buildx:
        missing.append(
            (
                "the Docker client has no buildx",
                "sudo apt-get install docker-buildx (Debian, Ubuntu) or docker-buildx-plugin "
                "(Docker's own packages)",
            )
        )
    elif version_of(buildx) < OLDEST:
        missing.append((f"buildx is {buildx}, older than 0.13", "upgrade docker-buildx"))
    if missing:
        raise _lacking(target, missing)
    store = "containerd" if _CONTAINERD in json.dumps(facts.get("driver")) else "classic"
    chosen = _choose(docker, env, target, builder, store)
    buildkit, judged = _judge(chosen, facts["server"], target)
    return {
        "schema": SCHEMA,
        "docker": docker,
        "docker_host": target.host,
        "env": dict(target.env),
        "builder": chosen.name,
        "driver": chosen.driver,
        "store": store,
        "init": bool(facts.get("init")) and facts["init"] != "N/A",
        "versions": {"engine": facts["server"], "buildx": buildx, "buildkit": buildkit},
        "judged": judged,
    }


def _json_line(output: str) -> dict[str, Any]:
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return {}


class SilentError(ForgeError):
    """No daemon answers, so a private one may take its place."""


class ClassicError(ForgeError):
    """The classic image store and no other builder, so the private engine of before is better."""


def _silent(target: Target, output: str) -> SilentError:
    said = [line for line in output.splitlines() if line.strip() and not line.startswith("{")]
    named = f" (named by {target.named_by})" if target.named_by else ""
    if "permission denied" in output.lower():
        mend = 'sudo usermod -aG docker "$USER", then log in again'
    elif target.named_by:
        mend = f"start that Docker, or change {target.named_by}"
    else:
        mend = "sudo systemctl start docker"
    return SilentError(
        f"no Docker daemon answers at {target.host}{named}\n" + "\n".join(said[:4]),
        expected="a Docker daemon that answers",
        mend=mend,
    )


def _lacking(target: Target, missing: Sequence[tuple[str, str]]) -> ForgeError:
    return ForgeError(
        f"the Docker at {target.host} cannot bake: " + "; ".join(what for what, _ in missing),
        expected="buildx and BuildKit 0.13 or newer, and a builder that exports OCI layouts",
        mend="; ".join(how for _, how in missing),
    )


@dataclass(frozen=True)
class Builder:
    """A builder, as ``docker buildx inspect`` describes it.

    Attributes:
        name: Its name.
        driver: ``docker``, ``docker-container``, ``remote``, …
        running: Whether its first node runs.
        buildkit: BuildKit's version; empty if it was not told.
    """

    name: str
    driver: str
    running: bool
    buildkit: str


def parse_builder(text: str) -> Builder:
    """Read the output of ``docker buildx inspect``.

    Args:
        text: The output.
    """

    def value(label: str) -> str:
        form = re.search(rf"^{label}:[ \t]*(.*)$", text, re.MULTILINE)
        return form[1].strip() if form else ""

    version = value("BuildKit version") or value("BuildKit") or value("Buildkit")
    return Builder(value("Name"), value("Driver"), value("Status") == "running", version)


def _inspect(docker: str, env: Mapping[str, str], name: str) -> Builder | None:
    done = _ask(docker, env, "buildx", "inspect", name)
    found = parse_builder(done.output)
    return found if done.code == 0 and found.driver else None


def _choose(
    docker: str, env: Mapping[str, str], target: Target, wanted: str | None, store: str
) -> Builder:
    """The builder that the user wants, the daemon's own, or another one that exports layouts."""
    if wanted:
        found = _inspect(docker, env, wanted)
        if found is None:
            raise ForgeError(
                f"there is no builder {wanted!r}",
                expected="a builder that docker buildx ls lists",
                mend=_CREATE.replace("tpuforge", wanted),
            )
        if found.driver == "docker" and store == "classic":
            raise _classic(target, f"the builder {wanted!r} is the daemon's own")
        return found
    if store == "containerd":
        found = _inspect(docker, env, target.builder)
        if found is not None:
            return found
        raise _lacking(target, [("buildx does not see the daemon's builder", "docker buildx ls")])
    listed = _ask(docker, env, "buildx", "ls")
    for line in listed.output.splitlines()[1:]:
        words = line.split()
        if line[:1].isspace() or len(words) < 2 or words[1] == "docker":
            continue
        found = _inspect(docker, env, words[0].rstrip("*"))
        if found and found.driver != "docker" and found.running:
            return found
    raise _classic(target, "no other builder is running")


def _classic(target: Target, why: str) -> ClassicError:
    return ClassicError(
        f"the Docker at {target.host} has the classic image store, which cannot export OCI "
        f"layouts, and {why}",
        expected="a builder of the docker-container kind, or the containerd image store",
        mend=f"{_OTHER}; or set features.containerd-snapshotter to true in "
        "/etc/docker/daemon.json and restart Docker",
    )


def _judge(builder: Builder, engine: str, target: Target) -> tuple[str, str]:
    """BuildKit's version and how it was judged; an error when it is too old."""
    version = version_of(builder.buildkit)
    if version >= OLDEST:
        return builder.buildkit, "by BuildKit's own version"
    # Debian's daemon says v0.0.0+unknown of the BuildKit inside it
    unknown = not any(version)
    if unknown and builder.driver == "docker":
        if version_of(engine) >= (daemon.OLDEST,):
            said = builder.buildkit or "nothing"
            return "unknown", f"by the engine's version: BuildKit says {said}"
        what = f"the engine is {engine}, older than {daemon.OLDEST}, so its BuildKit is too"
        raise _lacking(
            target, [(what, f"upgrade Docker to {daemon.OLDEST} or newer; or: {_OTHER}")]
        )
    if unknown:
        what = f"the builder {builder.name} does not tell its BuildKit's version"
        raise _lacking(target, [(what, f"docker buildx inspect --bootstrap {builder.name}")])
    what = f"BuildKit of the builder {builder.name} is {builder.buildkit}, older than 0.13"
    raise _lacking(target, [(what, f"upgrade Docker to {daemon.OLDEST} or newer; or: {_OTHER}")])


def ensure_engine(
    progress: Progress,
    *,
    builder: str | None = None,
    install: bool = True,
    private: bool = False,
) -> dict[str, Any]:
    """Have an engine that can bake.

    The first that is there: the Docker that ``DOCKER_HOST``, ``DOCKER_CONTEXT`` or Docker's own
    configuration names; the private one in ``out/engine``; Docker's default; a new private one.
    A default that cannot export OCI layouts gives way to a private one that was set up before.

    Args:
        progress: Told what happens.
        builder: A builder to use.
        install: Whether packages may be installed and a private engine started.
        private: Take the private one even if there is another.

    Returns:
        The record, as in ``out/engine/engine.json`` (format: docs/engine.md).

    Raises:
        ForgeError: If there is none and none can be set up; exit code 2.
    """
    docker = which("docker")
    running = daemon.running_pid()
    if private:
        silent = ForgeError("no private engine runs", expected="root on Debian or Ubuntu")
        if docker and running and daemon.answers():
            return _private(docker, running, builder)
    elif docker:
        target = user_target(docker)
        if running and not target.named_by and daemon.answers():
            return _private(docker, running, builder)
        try:
            return _record(probe(docker, target, builder))
        except SilentError as error:
            if target.named_by:
                raise
            silent = error
        except ClassicError as error:
            # such as after a restart: the machine's Docker runs again, and the one taken does not
            if target.named_by or builder or not install or not _had_private():
                raise
            silent = error
    else:
        silent = ForgeError("there is no Docker client on PATH", expected="docker")
        named = os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT")
        if named:
            raise ForgeError(
                f"there is no Docker client on PATH to reach {named}",
                expected="docker, with buildx 0.13 or newer",
                mend="sudo apt-get install docker-cli docker-buildx   (Ubuntu: docker.io instead "
                "of docker-cli)",
            )
    if os.geteuid() != 0 or not (daemon.usable_dockerd() or can_install()):
        raise _by_hand(silent)
    if not install:
        silent.mend = "run it again without --no-install, or start your Docker"
        raise silent
    with exclusive("engine", lambda who: progress.note(f"waiting for {who}, which starts Docker")):
        running = daemon.running_pid()
        if not (running and daemon.answers()):
            progress.note(f"{silent.found.splitlines()[0]}: setting up a private engine")
            daemon.ensure_packages(progress)
            running = daemon.start(progress)
        docker = which("docker")
        if not docker:
            raise silent
        return _private(docker, running, builder)


def _had_private() -> bool:
    """Whether a private engine was set up here, and can be started again."""
    record = recorded()
    private = record is not None and record["private"]
    return bool(private and os.geteuid() == 0 and daemon.usable_dockerd())


def _by_hand(silent: ForgeError) -> ForgeError:
    return ForgeError(
        silent.found,
        expected="a Docker daemon that this user can reach",
        mend=silent.mend
        if "usermod" in silent.mend
        else "sudo apt-get install docker.io docker-buildx   (Debian 13, Ubuntu), then: "
        'sudo usermod -aG docker "$USER" and log in again; or run ./forge as root, which sets up '
        "a private engine; or use rootless Docker (dockerd-rootless-setuptool.sh install) and "
        "name it with DOCKER_HOST",
    )


def _private(docker: str, pid: int, builder: str | None) -> dict[str, Any]:
    host = f"unix://{daemon.socket_path()}"
    found = probe(docker, Target({**_folders(), "DOCKER_HOST": host}, host), builder)
    return _record(found, pid)


def _record(found: dict[str, Any], pid: int | None = None) -> dict[str, Any]:
    found |= {"private": pid is not None, "pid": pid}
    if read_json(record_path()) != found:
        write_json(record_path(), found)
    return found


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.stop:
        with exclusive("engine", lambda who: progress.note(f"waiting for {who}")):
            ended = daemon.stop(progress)
            record = recorded()
            if record is not None and record["private"]:
                record_path().unlink(missing_ok=True)
        if ended:
            return Outcome("done", "the private engine is stopped; its cache stays in out/engine")
        return Outcome("unchanged", "no private engine runs")
    before = recorded()
    record = ensure_engine(
        progress,
        builder=options.builder,
        install=not options.no_install,
        private=options.private,
    )
    versions = record["versions"]
    kind = "private engine" if record["private"] else "Docker"
    summary = (
        f"{kind} {versions['engine']} at {record['docker_host']}, buildx {versions['buildx']}, "
        f"builder {record['builder']} ({record['store']} store; BuildKit judged {record['judged']})"
    )
    notes = []
    if not record["init"]:
        notes.append("the engine has no docker-init, so docker run --init will not work there")
    return Outcome("unchanged" if record == before else "done", summary, record, notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Find a usable Docker engine, or set up a private one.

    Args:
        argv: Arguments; the process's own if not given.

    Returns:
        The exit code.
    """
    arguments = parser("engine", "Find a Docker engine that can bake, or set up a private one.")
    arguments.add_argument("--stop", action="store_true", help="stop the private engine")
    arguments.add_argument(
        "--no-install",
        action="store_true",
        help="only look: install nothing and start nothing",
    )
    arguments.add_argument(
        "--private", action="store_true", help="use the private engine even if there is another"
    )
    arguments.add_argument("--builder", metavar="NAME", help="use this buildx builder")
    return run_verb("engine", arguments, _act, argv)


if __name__ == "__main__":
    raise SystemExit(main())

"""The Bazelisk line: what is run, with which remote service, and where.

The line holds everything that decides the wheel, so it can be pasted into a shell and gives the
same one. Where it runs is a :class:`Host` or a :class:`Container`; the paths in it are the same.

Facts: TorchTPU's ``.bazelrc``, ``ci/build_wheels.sh`` and ``.github/workflows/build_wheel.yml``;
Bazel's command-line reference.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpuforge.build import container
from tpuforge.build.address import require_public, shown, split
from tpuforge.build.bazelisk import Tool, end_server
from tpuforge.build.checkout import TARGET
from tpuforge.build.leftovers import MAX_IDLE_S, guarded
from tpuforge.errors import ForgeError
from tpuforge.paths import home, user_path

# the port of a remote service whose address names none
_PORTS = {"https": 443, "http": 80, "grpcs": 443, "grpc": 80}
_SCHEMES = {"cache": ("http", "https", "grpc", "grpcs"), "executor": ("grpc", "grpcs")}
# what is the same on every machine, whatever the user's own is
_OURS = ("LANG", "LC_ALL", "TZ", "PYTHONDONTWRITEBYTECODE")
_GCLOUD = Path(".config/gcloud/application_default_credentials.json")


@dataclass(frozen=True)
class Remote:
    """A remote service that a build uses.

    Attributes:
        kind: ``none``, ``cache``, ``executor`` or ``public-cache``.
        url: Its address; empty for ``none`` and for ``public-cache``, which the source names.
        instance: Name of the instance at that address; most services have but one.
        credentials: A file with Google credentials; None for a service without any.
    """

    kind: str = "none"
    url: str = ""
    instance: str = ""
    credentials: Path | None = None

    @property
    def configs(self) -> list[str]:
        """Bazel's configurations, in their order: of two settings the later one wins."""
        if self.kind == "executor":
            return ["wheel_common"]
        extra = ["public_caching_readonly"] if self.kind == "public-cache" else []
        return ["wheel_common", "no_rbe", *extra]

    @property
    def flags(self) -> list[str]:
        """What stands after the configurations.

        ``wheel_common`` names upstream's own cache, executor, instance and credentials, uploads
        nothing, leaves outputs on the remote and runs 200 jobs; ``no_rbe`` takes back the first
        two and the credentials. The rest is taken back here.
        """
        fetched = ["--remote_download_outputs=toplevel"]
        if self.kind in ("none", "public-cache"):
            return fetched if self.kind == "public-cache" else []
        name = "remote_executor" if self.kind == "executor" else "remote_cache"
        flags = [f"--{name}={self.url}"]
        if self.kind == "executor":
            # an executor's own cache, and not upstream's
            flags.append("--remote_cache=")
        flags += [
            f"--remote_instance_name={self.instance}",
            "--remote_upload_local_results=true",
            "--google_default_credentials=false",
        ]
        if self.credentials is not None:
            flags.append(f"--google_credentials={self.credentials}")
        return flags + fetched


@dataclass(frozen=True)
class Plan:
    """What one run is to do.

    Attributes:
        work: Folder for everything that Bazel keeps.
        remote: The remote service.
        jobs: How many actions at once; None for Bazel's own choice.
        keep_going: Whether to build on after a failure.
        limit_s: Seconds that one wheel may take.
        configs: Configurations of the source that the user added.
        system_rc: Whether Bazel reads the settings of the machine (``/etc/bazel.bazelrc``): a Bazel
            of a distribution needs what stands there to start.
    """

    work: Path
    remote: Remote = field(default_factory=Remote)
    jobs: int | None = None
    keep_going: bool = False
    limit_s: float = 43200.0
    configs: tuple[str, ...] = ()
    system_rc: bool = False

    @property
    def events(self) -> Path:
        """Where Bazel writes its build events. They hold its environment: a folder for us alone."""
        return self.work / "run" / "events.json"

    @property
    def all_configs(self) -> list[str]:
        """Every configuration, in the order of the line: ours that take back come last."""
        first, *rest = self.remote.configs
        return [first, *self.configs, *rest]

    def startup(self, tool: str) -> list[str]:
        """Bazelisk, and the options that decide which server it talks to."""
        return [
            tool,
            # the source's own .bazelrc is read, and no other
            *([] if self.system_rc else ["--nosystem_rc"]),
            "--nohome_rc",
            f"--output_user_root={self.work / 'root'}",
            f"--max_idle_secs={MAX_IDLE_S}",
        ]


def command(plan: Plan, tool: str, python: str, suffix: str) -> list[str]:
    """The Bazelisk line.

    Args:
        plan: What this run is to do.
        tool: Path or name of Bazelisk.
        python: ``X.Y`` that the wheel is for.
        suffix: Development suffix of its version, such as ``.dev20261130``; empty for a release.

    Returns:
        The words of the line. ``no_rbe`` comes after ``wheel_common`` because the later one wins:
        both set the remote executor. Caches and remote services come after both.
    """
    # 200 jobs are upstream's choice for its remote executor
    jobs = plan.jobs or (None if plan.remote.kind == "executor" else "auto")
    return [
        *plan.startup(tool),
        "build",
        *(f"--config={name}" for name in plan.all_configs),
        *plan.remote.flags,
        f"--disk_cache={plan.work / 'disk'}",
        f"--repository_cache={plan.work / 'repository'}",
        f"--repo_env=HERMETIC_PYTHON_VERSION={python}",
        "--define",
        f"PYTHON_VERSION={python}",
        f"--repo_env=WHEEL_VERSION_EXTRAS={suffix}",
        *([f"--jobs={jobs}"] if jobs else []),
        "--keep_going" if plan.keep_going else "--nokeep_going",
        # the same action has the same key in every home folder
        "--incompatible_strict_action_env",
        # the user's folder stays as it is: no bazel-* links
        "--symlink_prefix=/",
        "--curses=no",
        "--color=no",
        f"--build_event_json_file={plan.events}",
        # with a remote the events would say where in its store an output is, and not where here
        "--nobuild_event_json_file_path_conversion",
        TARGET,
    ]


def parse_remote(text: str, instance: str = "", credentials: str | None = None) -> Remote:
    """Read ``--remote``, ``--instance`` and ``--credentials``.

    Args:
        text: ``none``, ``cache=URL``, ``executor=URL`` or ``public-cache``.
        instance: Name of the instance.
        credentials: ``google`` for those of gcloud, or a file.

    Raises:
        ForgeError: For anything else, and for an address with a password in it.
    """
    kind, equals, url = text.partition("=")
    if kind in ("none", "public-cache") and not equals:
        if instance or credentials is not None:
            raise ForgeError(
                f"--remote {kind} takes neither --instance nor --credentials",
                expected="both with cache=URL or executor=URL alone",
                mend="leave them out",
            )
        return Remote(kind)
    parts = split(url)
    if parts is None or parts.scheme not in _SCHEMES.get(kind, ()):
        raise ForgeError(
            f"--remote {shown(text)} is not understood",
            expected="none, cache=URL (http, https, grpc or grpcs), executor=URL (grpc or grpcs) or"
            " public-cache",
            mend="./forge build_wheel --help",
        )
    require_public(
        f"--remote {kind}", url, "put user and password into ~/.netrc, which is handed to Bazel"
    )
    file = None
    if credentials == "google":
        given = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if given is None and home() is None:
            raise ForgeError(
                "--credentials google: this user has no home folder",
                expected="the file that gcloud leaves there",
                mend="name it: --credentials FILE",
            )
        file = user_path(given or Path(home() or "/", _GCLOUD))
    elif credentials is not None:
        file = user_path(credentials)
    return Remote(kind, url, instance, file)


def host_of(url: str) -> tuple[str, int] | None:
    """Host and port of a remote service.

    Args:
        url: Its address.

    Returns:
        None for what is no such address.
    """
    parts = split(url)
    if parts is None or parts.hostname is None or parts.scheme not in _PORTS:
        return None
    return parts.hostname, parts.port or _PORTS[parts.scheme]


class Host:
    """Where Bazel runs: this host.

    Args:
        plan: What this run is to do.
        source: The workspace.
        env: Bazel's environment.
        tool: Bazelisk.
    """

    name = "host"
    image: str | None = None

    def __init__(self, plan: Plan, source: Path, env: Mapping[str, str], tool: Tool) -> None:
        self._plan = plan
        self._source = source
        self.env = env
        self.tool = tool

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Whatever ends inside, no server is left; one that a killed run left is ended first."""
        startup = self._plan.startup(str(self.tool.path))
        # the work folder is ours alone now
        end_server(startup, self._source, self._plan.work, self.env)
        with guarded(self._plan.work, self._plan.events):
            try:
                yield
            finally:
                end_server(startup, self._source, self._plan.work, self.env)

    def words(self, line: Sequence[str]) -> list[str]:
        """What has to be run so that a Bazelisk line runs here."""
        return list(line)

    def process_env(self) -> Mapping[str, str]:
        """The environment of :meth:`words`."""
        return self.env

    def shown(self, line: Sequence[str]) -> str:
        """The line as one can paste it into a shell of the same user.

        What comes from the user's environment is named and not told: a proxy may have a password.
        """
        variables = [
            f"{name}={shlex.quote(value)}"
            if name in _OURS or os.environ.get(name) != value
            else f'{name}="${name}"'
            for name, value in sorted(self.env.items())
        ]
        folder = shlex.quote(str(self._source))
        return f"cd {folder} && env -i {' '.join(variables)} {shlex.join(self.words(line))}"


class Container(Host):
    """Where Bazel runs: a container of the builder image.

    Args:
        plan: What this run is to do.
        source: The workspace.
        env: Bazel's environment on the host.
        builder: The image.
        pin_sha256: Digest of the Bazelisk that the image has.
    """

    name = "container"

    def __init__(
        self,
        plan: Plan,
        source: Path,
        env: Mapping[str, str],
        builder: container.Builder,
        pin_sha256: str,
    ) -> None:
        super().__init__(plan, source, env, Tool(Path(container.BAZELISK), "image", pin_sha256))
        self._builder = builder
        self._container = ""
        self.image = builder.digest

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Bazel's server is inside, and goes with the container.

        One that a killed build on the host left is ended first: it would answer on the loopback.
        """
        end_server([], self._source, self._plan.work, self.env)
        try:
            with container.running(self._builder, self._plan.work) as name:
                self._container = name
                removal = [*self._builder.client, "rm", "--force", "--volumes", name]
                with guarded(self._plan.work, self._plan.events, removal):
                    yield
        finally:
            end_server([], self._source, self._plan.work, self.env)

    def words(self, line: Sequence[str]) -> list[str]:
        """The client's line around a Bazelisk line."""
        credentials = self._plan.remote.credentials
        return container.command(
            self._builder,
            line,
            name=self._container or "tpuforge-build",
            source=self._source,
            work=self._plan.work,
            env=self.env,
            limit_s=self._plan.limit_s,
            files=[credentials] if credentials else [],
        )

    def process_env(self) -> Mapping[str, str]:
        """The environment of the client."""
        return {**self.env, **self._builder.env}

    def shown(self, line: Sequence[str]) -> str:
        """The client's line; it needs no variable but those it names."""
        return shlex.join(self.words(line))

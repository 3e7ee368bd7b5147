"""``build_wheel``: build the TorchTPU wheel from source, through Bazelisk.

The command is the one upstream documents; what it leaves open (where the source comes from, which
Bazel, which remote service, what a version is called) is settled before it runs, and said. Where
the wheel is comes from Bazel's build events, never from a guess in ``bazel-bin``, where older
wheels stay. No Bazel server outlives a run.

The rooms: :mod:`~tpuforge.build.preflight` measures the machine, :mod:`~tpuforge.build.checkout`
has the source, :mod:`~tpuforge.build.bazelrc` reads its settings, :mod:`~tpuforge.build.bazelisk`
has Bazelisk and Bazel, :mod:`~tpuforge.build.container` the builder image,
:mod:`~tpuforge.build.events` follows and explains, :mod:`~tpuforge.build.normalise` makes equal
wheels equal bytes, :mod:`~tpuforge.build.audit` judges them and
:mod:`~tpuforge.build.statement` says how they were made.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from tpuforge import pins as pins_module
from tpuforge.build import bazelrc, checkout, container, preflight, statement
from tpuforge.build.address import require_public, shown, split
from tpuforge.build.audit import errors_text, remembered
from tpuforge.build.bazelisk import (
    Bazel,
    Tool,
    environment,
    find_bazelisk,
    prepare_bazel,
    verify_bazel,
    wanted_bazel,
)
from tpuforge.build.checkout import TARGET, Checkout
from tpuforge.build.events import (
    Built,
    Follower,
    Standstill,
    cache_trouble,
    describe,
    explain,
    read_events,
)
from tpuforge.build.leftovers import LOCK, processor_s
from tpuforge.build.line import Container, Host, Plan, command, host_of, parse_remote
from tpuforge.build.normalise import differences, normalise
from tpuforge.console import Progress, duration, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import (
    ROOT,
    exclusive,
    home,
    out_dir,
    read_json,
    sha256_file,
    user_path,
    write_atomic,
    write_json,
)
from tpuforge.pins import Pins, Upstream
from tpuforge.process import Completed, run
from tpuforge.verb import Outcome, parser, run_verb

VERB = "build_wheel"

_BAZEL_LIMIT_S = 900.0
_TIME_OF_COMMIT = ".devYYYYMMDDHHMMSS"
_DOCKER_SOCKET = Path("/var/run/docker.sock")
_HOURS_MOST = 8760
_FOLDERS = ("home", "disk", "repository", "sources")
# what the root of a new disk has
_KNOWN = ("lost+found",)
_SUFFIX = re.compile(r"\.(?:dev|post)(?:0|[1-9]\d*)")


@dataclass(frozen=True)
class _Run:
    """What the user asked for, and what the pins say to it."""

    options: argparse.Namespace
    pins: Pins
    plan: Plan
    where: str
    progress: Progress

    @property
    def ref(self) -> str:
        """The ref that is fetched when no folder was named."""
        return str(self.options.ref or self.pins.upstream.ref)


@dataclass(frozen=True)
class _Settled:
    """Everything that is settled before the first wheel is built."""

    run: _Run
    source: Checkout
    place: Host
    bazel: Bazel
    suffix: str


@dataclass(frozen=True)
class _Build:
    """One build that ended well."""

    python: str
    line: Sequence[str]
    built: Built
    started: datetime
    finished: datetime
    cache_trouble: str


def build(options: argparse.Namespace, progress: Progress) -> Outcome:
    """The verb: settle everything, build a wheel for every Python, keep, judge and prove it.

    Args:
        options: Its arguments.
        progress: Its display.

    Returns:
        The wheels; the figures and lines alone with ``--dry-run``.

    Raises:
        ForgeError: If there is no source, no Bazelisk, no Bazel, or not every wheel.
    """
    pins = pins_module.load()
    pythons = _pythons(options.python, pins)
    work = _work(options)
    if options.repository is not None:
        checkout.require_repository(options.repository)
    if options.bazel_url is not None:
        _require_bazel_url(options.bazel_url)
    plan = Plan(
        work=work,
        remote=parse_remote(options.remote, options.instance, options.credentials),
        jobs=options.jobs,
        keep_going=options.keep_going,
        limit_s=options.limit_hours * 3600,
        configs=tuple(options.config),
        system_rc=options.bazel is not None and user_path(options.bazel).is_file(),
    )
    this = _Run(options, pins, plan, _where(options.where), progress)
    if options.dry_run:
        return _dry_run(this, pythons)
    plan.work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # in the folder itself, since two checkouts may share it
        lock = str(plan.work / LOCK)
        stack.enter_context(exclusive(lock, on_wait=_waiting(progress)))
        _make_folders(plan)
        stack.callback(plan.events.unlink, missing_ok=True)
        source = _source(this)
        suffix = _suffix(options, source)
        wanted = wanted_bazel(source.path, options.bazel)
        # before anything of it runs, and again once it is there
        verify_bazel(wanted, pins.bazel, plan.work)
        place = _place(this, source, wanted)
        stack.enter_context(place.open())
        with progress.step(f"having Bazel {Path(wanted).name}"):
            bazel = prepare_bazel(
                place.words([str(place.tool.path), "--version"]),
                wanted,
                pins.bazel,
                plan.work,
                place.process_env(),
                cwd=source.path,
                timeout=min(_BAZEL_LIMIT_S, plan.limit_s),
            )
        settled = _Settled(this, source, place, bazel, suffix)
        return _outcome(settled, *_all(settled, pythons))


def _work(options: argparse.Namespace) -> Path:
    """The folder for everything that Bazel keeps, if it may be one."""
    work = user_path(options.cache) if options.cache is not None else out_dir() / "bazel"
    mend = "name another: --cache DIR"
    if " " in str(work):
        raise ForgeError(
            f"Bazel cannot work in {work}: there is a space in it",
            expected="a folder for its caches without one",
            mend=mend,
        )
    real = work.resolve()
    if any(place and place.resolve().is_relative_to(real) for place in (ROOT, out_dir(), home())):
        raise ForgeError(
            f"{work} holds more than caches",
            expected="a folder of its own: what a killed build left in it is removed",
            mend=mend,
        )
    if options.source is not None and real.is_relative_to(user_path(options.source).resolve()):
        raise ForgeError(
            f"{work} is in the source",
            expected="a folder outside of it: the source stays as it is",
            mend=mend,
        )
    if options.cache is not None and work.is_dir() and not (work / LOCK).exists():
        strange = sorted(path.name for path in work.iterdir() if path.name not in _KNOWN)
        if strange:
            raise ForgeError(
                f"{work} holds {', '.join(strange[:3])}, and no build has used it before",
                expected="a new or empty folder, or the one of an earlier build",
                mend=mend,
            )
    return work


def _require_bazel_url(url: str) -> None:
    """Refuse an address that Bazelisk cannot download from, or that holds a password."""
    require_public(
        "--bazel-url", url, "use a server that asks for none, or a Bazel of your own: --bazel PATH"
    )
    parts = split(url)
    if parts is None or parts.scheme not in ("http", "https"):
        raise ForgeError(
            f"--bazel-url {shown(url)} is not understood",
            expected="an http or https address with a folder for each version of Bazel",
            mend="./forge build_wheel --help",
        )


def _pythons(given: Sequence[str] | None, pins: Pins) -> list[str]:
    if given == ["all"]:
        return list(pins.pythons)
    return [pins.python(one) for one in dict.fromkeys(given or [pins.default_python])]


def _where(given: str | None) -> str:
    """The builder image, where there is an engine that the user may talk to; else this host."""
    if given is not None:
        return given
    records = (f"images/{container.IMAGE}/image.json", "engine/engine.json")
    if any(read_json(out_dir() / record) is not None for record in records):
        return "container"
    docker = shutil.which("docker") is not None
    allowed = "DOCKER_HOST" in os.environ or os.access(_DOCKER_SOCKET, os.W_OK)
    return "container" if docker and allowed else "host"


def _make_folders(plan: Plan) -> None:
    """The folders of a run; the events of a killed one go, since they hold its environment."""
    for name in _FOLDERS:
        (plan.work / name).mkdir(exist_ok=True)
    plan.events.parent.mkdir(mode=0o700, exist_ok=True)
    plan.events.unlink(missing_ok=True)


def _source(this: _Run) -> Checkout:
    """The source, once the machine is found able to build it and its settings well."""
    options, pins, progress = this.options, this.pins, this.progress
    sources = this.plan.work / "sources"
    if options.source is not None:
        source = checkout.local(options.source, pins.upstream, allow_dirty=options.allow_dirty)
        _preflight(this, source.path)
    else:
        _preflight(this, None)
        checkout.prune(sources)
        with progress.step(f"having the source, {this.ref}"):
            source = checkout.fetch(this.ref, pins.upstream, sources, repository=options.repository)
    progress.note(f"source: {source.described}", loud=not source.verified)
    _check_settings(source, this.plan)
    return source


def _needs(this: _Run, source: Path | None) -> preflight.Needs:
    """What the preflight has to look at."""
    options, pins, plan = this.options, this.pins, this.plan
    hosts: dict[tuple[str, int], str] = {}
    helpful = preflight.hosts_of(source) if source is not None else {}
    git = "to tell which commit the source is" if source and (source / ".git").exists() else ""
    if source is None:
        git = "to fetch the source"
        address = checkout.host_of(options.repository or pins.upstream.repository)
        if address is not None:
            hosts[address] = "the source"
    elif plan.remote.kind == "public-cache":
        named = bazelrc.read(source).settings(plan.all_configs).get("remote_cache")
        hosts |= _host(named.value, "upstream's public cache") if named else {}
    hosts |= _host(plan.remote.url, f"the remote {plan.remote.kind}")
    hosts |= _host(options.bazel_url or "", "Bazel")
    return preflight.Needs(
        work=plan.work,
        machine=pins.upstream.machine,
        glibc=None if this.where == "container" else pins.glibc,
        git=git,
        hosts=hosts,
        helpful=helpful,
        credentials=plan.remote.credentials,
    )


def _host(url: str, why: str) -> dict[tuple[str, int], str]:
    host = host_of(url)
    return {host: why} if host else {}


def _preflight(this: _Run, source: Path | None) -> None:
    """Measure the machine; say what is short, and stop where the build cannot succeed."""
    began = time.monotonic()
    figures = preflight.measure(_needs(this, source))
    short = [figure for figure in figures if not figure.ok]
    stops = [figure for figure in short if figure.stops]
    for figure in short:
        if figure not in stops:
            this.progress.note(figure.line)
    if stops:
        own = [] if source else ["a checkout of your own needs no fetching: --source DIR"]
        raise ForgeError(
            "this machine lacks what the build needs: "
            + "; ".join(f"{figure.name}: {figure.found}" for figure in stops),
            expected="; ".join(figure.wanted for figure in stops),
            mend="; ".join([*(figure.remedy for figure in stops), *own]),
        )
    spent = time.monotonic() - began
    count = len(figures)
    this.progress.note(f"preflight: {count - len(short)} of {count} are well, {spent:.2f} s")


def _check_settings(source: Checkout, plan: Plan) -> None:
    faults = bazelrc.check(source.path, plan.all_configs)
    if faults:
        raise ForgeError(
            "; ".join(faults),
            expected=f"a source whose .bazelrc defines {', '.join(plan.all_configs)} as TorchTPU's"
            " does",
            mend="build another ref, or mend .bazelrc in a checkout of your own: --source DIR",
            exit_code=Exit.FAULT,
        )


def _suffix(options: argparse.Namespace, source: Checkout) -> str:
    """The suffix of the version: nothing for a release; for a development build the commit's time.

    The clock would give another wheel for the same commit every second.
    """
    if options.suffix is not None:
        if not _SUFFIX.fullmatch(options.suffix):
            raise ForgeError(
                f"--suffix {options.suffix!r}",
                expected="a suffix as versions sort it, such as .dev20261130",
                mend="use --dev, which takes it from the time of the commit",
            )
        return str(options.suffix)
    if not options.dev:
        return ""
    if source.epoch is None:
        raise ForgeError(
            f"--dev: {source.path} has no commit whose time it could take",
            expected="a git checkout",
            mend="name the suffix: --suffix .devYYYYMMDDHHMMSS",
        )
    return f".dev{datetime.fromtimestamp(source.epoch, UTC):%Y%m%d%H%M%S}"


def _environment(this: _Run, wanted: str) -> dict[str, str]:
    env = environment(this.plan.work, wanted, this.options.bazel_url)
    if wanted in this.pins.bazel:
        # Bazelisk compares it when it downloads
        env["BAZELISK_VERIFY_SHA256"] = this.pins.bazel[wanted]
    own = home()
    named = os.environ.get("NETRC") or (own / ".netrc" if own else "")
    netrc = Path(named)
    if named and this.plan.remote.kind in ("cache", "executor") and netrc.is_file():
        env["NETRC"] = str(netrc)
    return env


def _place(this: _Run, source: Checkout, wanted: str) -> Host:
    """Where Bazel is going to run, said in one line."""
    env = _environment(this, wanted)
    if this.where == "container":
        if this.options.bazelisk is not None:
            raise ForgeError(
                "--bazelisk has no meaning in the builder image",
                expected="its own Bazelisk, which is the pinned one",
                mend="leave it out, or build on this host: --where host",
            )
        builder = container.find_builder(this.progress)
        this.progress.note(f"where: the image {builder.name} (on this host: --where host)")
        return Container(this.plan, source.path, env, builder, this.pins.bazelisk.sha256)
    tool = find_bazelisk(this.options.bazelisk, this.pins.bazelisk, out_dir() / "bazel")
    this.progress.note("where: this host (in the builder image: --where container)")
    return Host(this.plan, source.path, env, tool)


def _dry_run(this: _Run, pythons: Sequence[str]) -> Outcome:
    """The figures and the lines; nothing is fetched, made or run."""
    options = this.options
    source = None
    if options.source is not None:
        source = checkout.local(options.source, this.pins.upstream, allow_dirty=options.allow_dirty)
        _check_settings(source, this.plan)
        suffix = _suffix(options, source)
        wanted = wanted_bazel(source.path, options.bazel)
    else:
        suffix = options.suffix or (_TIME_OF_COMMIT if options.dev else "")
        wanted = options.bazel or ""
    path = source.path if source else this.plan.work / "sources" / this.ref
    env = _environment(this, wanted)
    builder = container.known() if this.where == "container" else None
    if builder is not None:
        place: Host = Container(this.plan, path, env, builder, this.pins.bazelisk.sha256)
    else:
        named = Path("bazelisk") if options.bazelisk is None else user_path(options.bazelisk)
        place = Host(this.plan, path, env, Tool(named, "named", ""))
    tool = place.tool
    lines = [place.shown(command(this.plan, str(tool.path), one, suffix)) for one in pythons]
    figures = preflight.measure(_needs(this, source.path if source else None))
    described = source.described if source else f"{this.ref}, not fetched yet"
    return Outcome(
        "done",
        "the lines and the figures only; nothing was run",
        {
            "lines": lines,
            "where": this.where,
            "source": described,
            "preflight": [vars(figure) for figure in figures],
        },
        text="\n".join(
            [
                *lines,
                "",
                *(figure.line for figure in figures),
                f"source: {described}",
                f"where: {this.where}"
                + (
                    "" if place.name == this.where else ", with this line in an image still to bake"
                ),
            ]
        ),
    )


def _all(
    settled: _Settled, pythons: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, ForgeError]]:
    """A wheel for every Python: what was made, and what went wrong for whom."""
    records: list[dict[str, Any]] = []
    failed: dict[str, ForgeError] = {}
    for python in pythons:
        try:
            made = _run_bazel(settled, python)
            with exclusive("wheels", on_wait=_waiting(settled.run.progress)):
                records.append(_keep(settled, made))
        except ForgeError as error:
            if len(pythons) == 1 or not settled.run.plan.keep_going:
                raise
            settled.run.progress.note(f"Python {python}: {error.found}", loud=True)
            failed[python] = error
    return records, failed


def _waiting(progress: Progress) -> Callable[[str], None]:
    return lambda who: progress.note(f"waiting for {who}")


def _run_bazel(settled: _Settled, python: str) -> _Build:
    """Build the wheel of one Python."""
    plan, place, progress = settled.run.plan, settled.place, settled.run.progress
    line = command(plan, str(place.tool.path), python, settled.suffix)
    progress.note(place.shown(line))
    log = plan.work / f"build_wheel-py{python.replace('.', '')}.log"
    plan.events.unlink(missing_ok=True)
    # any of them may be a mount or a link to another disk
    written = [plan.work, *(plan.work / name for name in ("root", *_FOLDERS))]
    standstill = Standstill(written, lambda: processor_s(plan.work))
    follower = Follower(plan.events, progress.detail, standstill)
    started = datetime.now(UTC)
    try:
        with progress.step(f"building the wheel for Python {python}"):
            follower.start()
            done = run(
                place.words(line),
                timeout=plan.limit_s,
                env=place.process_env(),
                cwd=settled.source.path,
                check=False,
                on_line=follower.line,
                log=log,
                doing="building the wheel",
                mend=f"read {log}, or give it more time: --limit-hours {plan.limit_s / 1800:g}",
                stop=follower.hopeless,
            )
    except ForgeError as error:
        if follower.why is None:
            raise
        raise ForgeError(
            f"the build stood still and was ended: {follower.why.found}",
            expected="a build that goes on or ends",
            mend=f"{follower.why.remedy}; the log: {log}",
        ) from error
    finally:
        follower.stop()
    built = read_events(plan.events)
    plan.events.unlink(missing_ok=True)
    _judge(done, built, log)
    progress.note(built.actions.text)
    trouble = cache_trouble(done.output)
    if trouble:
        progress.note(f"the remote cache was of no use: {trouble}", loud=True)
    return _Build(python, line, built, started, datetime.now(UTC), trouble)


def _judge(done: Completed, built: Built, log: Path) -> None:
    """Turn Bazel's end into ours."""
    if done.code == 0 and len(built.wheels) == 1:
        return
    if done.code == 0:
        names = ", ".join(uri.rpartition("/")[2] for uri, _ in built.wheels) or "no wheel"
        raise ForgeError(
            f"Bazel ended well, and its build events name {names}",
            expected=f"exactly one wheel among the outputs of {TARGET}",
            mend=f"look at ci/wheel in the source, and at {log}",
            exit_code=Exit.FAULT,
        )
    cause = explain(built, done.output, done.code)
    raise ForgeError(
        f"Bazel ended with exit code {done.code}: {describe(built, cause, done.output)}",
        expected="exit code 0 and a wheel",
        mend=f"{cause.remedy}; the whole log: {log}",
        exit_code=Exit.FAULT if cause.about_source else Exit.CANNOT,
    )


def _keep(settled: _Settled, one: _Build) -> dict[str, Any]:
    """Judge a wheel, and put it into ``out/wheels`` with all that belongs to it.

    It is normalised first: its members get the time of the commit, and equal content equal bytes.
    """
    pins, progress = settled.run.pins, settled.run.progress
    if not checkout.is_unchanged(settled.source):
        raise ForgeError(
            f"{settled.source.path} was changed while it was built",
            expected="the source that was looked at before",
            mend="run the same command again, and leave the source alone meanwhile",
        )
    uri, stated = one.built.wheels[0]
    path = _path_of(uri, one.python, settled.suffix)
    folder = out_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    for left_by_a_killed_run in folder.glob(".kept-*"):
        shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
    final = folder / path.name
    before = sha256_file(final) if final.is_file() else None
    epoch = settled.source.epoch or pins.epoch
    with tempfile.TemporaryDirectory(prefix=".kept-", dir=folder) as name:
        raw, kept = Path(name) / "raw" / path.name, Path(name) / path.name
        raw.parent.mkdir()
        shutil.copyfile(path, raw)
        made = sha256_file(raw)
        if stated is not None and len(stated) == len(made) and made != stated:
            raise ForgeError(
                f"{path.name} has SHA-256 {made}",
                expected=f"{stated}, as Bazel's build events say",
                mend="run the same command again; something changed the file meanwhile",
                exit_code=Exit.FAULT,
            )
        with progress.step(f"normalising {path.name}"):
            digest = normalise(raw, kept, epoch)
        # any XLA commit will do: another source has another one
        report, _ = remembered(
            kept, digest, torch=pins.torch.full, xla_commit=None, progress=progress
        )
        write_json(kept.with_name(f"{path.name}.audit.json"), report.as_dict())
        statement.write(
            statement.path_for(kept), _statement(settled, one, path.name, (made, digest), epoch)
        )
        write_atomic(kept.with_name(f"{path.name}.sha256"), f"{digest}  {path.name}\n")
        if not report.ok:
            _move(kept, folder / "refused")
            raise ForgeError(
                f"{path.name} does not pass its audit: {report.verdict}\n{errors_text(report)}",
                expected="a wheel without errors",
                mend=f"mend the source; the wheel is in {folder / 'refused'} to be looked at",
                exit_code=Exit.FAULT,
            )
        # the same source built from another clean cache has to end in the same bytes
        changed = differences(final, kept, limit=3) if before not in (None, digest) else []
        if changed:
            progress.note(f"not the bytes of the wheel that was here: {'; '.join(changed)}")
        _move(kept, folder)
    return {
        "python": one.python,
        "wheel": f"wheels/{path.name}",
        "version": report.version,
        "sha256": digest,
        "made_sha256": made,
        "bytes": report.length,
        "unchanged": before == digest,
        "changed": changed,
        "audit": report.verdict,
        "actions": one.built.actions.text,
        "cache_trouble": one.cache_trouble,
        "bazel_seconds": round((one.finished - one.started).total_seconds(), 3),
        "line": settled.place.shown(one.line),
    }


def _move(wheel: Path, folder: Path) -> None:
    """Put a wheel and what lies beside it into a folder; no wheel is ever beside another's."""
    folder.mkdir(exist_ok=True)
    (folder / wheel.name).unlink(missing_ok=True)
    beside = [path for path in wheel.parent.iterdir() if path.is_file() and path != wheel]
    for path in [*beside, wheel]:
        path.replace(folder / path.name)


def _path_of(uri: str, python: str, suffix: str) -> Path:
    """The file that an event names, if it is the wheel that was asked for."""
    parts = urllib.parse.urlsplit(uri)
    path = Path(urllib.request.url2pathname(parts.path))
    try:
        if parts.scheme != "file":
            raise ValueError(f"it is not on this machine ({parts.scheme})")
        name, version, _, tags = parse_wheel_filename(path.name)
        interpreters = sorted({tag.interpreter for tag in tags})
        wanted = f"cp{python.replace('.', '')}"
        if name != "torch-tpu" or wanted not in interpreters:
            raise ValueError(f"it is {name} for {', '.join(interpreters)}")
        if not str(version).endswith(suffix):
            raise ValueError(f"its version {version} has not the suffix {suffix}")
    except (InvalidWheelFilename, ValueError) as error:
        raise ForgeError(
            f"{path.name} is not the wheel that was asked for: {error}",
            expected=f"torch_tpu for Python {python}",
            mend="look at ci/wheel in the source",
            exit_code=Exit.FAULT,
        ) from error
    return path


def _statement(
    settled: _Settled, one: _Build, name: str, digests: tuple[str, str], epoch: int
) -> statement.Build:
    """What is said beside the wheel of how it was made."""
    source, place, bazel, plan = settled.source, settled.place, settled.bazel, settled.run.plan
    pin, upstream = settled.run.pins.bazelisk, settled.run.pins.upstream
    pinned = place.tool.sha256 == pin.sha256
    made, digest = digests
    # a Bazelisk of the user's own is told by its digest alone
    own = {"$BAZELISK": place.tool.path} if place.tool.path.is_absolute() else {}
    return statement.Build(
        wheel=name,
        sha256=digest,
        source=statement.Source(
            repository=_public_name(source, upstream),
            ref=source.ref,
            commit=source.commit,
            dirty=source.dirty,
            tree_sha256=source.tree_sha256,
        ),
        python=one.python,
        configs=plan.all_configs,
        remote=plan.remote.kind,
        line=one.line,
        materials=[
            statement.Material(
                "bazelisk",
                place.tool.sha256,
                pin.version if pinned else None,
                f"pkg:npm/{pin.npm.replace('@', '%40')}@{pin.version}" if pinned else None,
            ),
            statement.Material("bazel", bazel.sha256, bazel.version),
        ],
        started=one.started,
        finished=one.finished,
        target=TARGET,
        remote_url=plan.remote.url or None,
        suffix=settled.suffix or None,
        epoch=epoch,
        environment=place.env,
        folders={"$SOURCE": source.path, "$CACHE": plan.work, "$OUT": out_dir(), **own},
        image=place.image,
        made_sha256=made,
    )


def _public_name(source: Checkout, upstream: Upstream) -> str:
    """Where others find a source: an address, or only the name of a folder that they cannot see."""
    if source.repository is not None and checkout.host_of(source.repository) is not None:
        return source.repository
    if source.verified and source.commit == upstream.commit:
        return upstream.repository
    return f"file:{urllib.parse.quote(Path(source.repository or source.path).name)}"


def _outcome(
    settled: _Settled, records: list[dict[str, Any]], failed: Mapping[str, ForgeError]
) -> Outcome:
    """One table of all Pythons, and one result."""
    rows = [
        f"{one['python']:<6}{Path(one['wheel']).name}  {size(one['bytes'])}  {one['sha256']}  "
        f"{one['audit']}  {duration(one['bazel_seconds'])}"
        for one in records
    ]
    if failed:
        rows += [f"{python:<6}{error.found.splitlines()[0]}" for python, error in failed.items()]
        first = next(iter(failed.values()))
        raise ForgeError(
            f"{len(failed)} of {len(rows)} wheels were not built\n" + "\n".join(rows),
            expected="a wheel for each Python",
            mend=first.mend,
            exit_code=first.exit_code,
        )
    source, place, bazel = settled.source, settled.place, settled.bazel
    notes = []
    if not source.verified:
        notes.append(f"The source is unverified: {source.described}.")
    if place.tool.sha256 != settled.run.pins.bazelisk.sha256:
        notes.append(f"Bazelisk is not the pinned one: SHA-256 {place.tool.sha256}.")
    if bazel.known != "pinned":
        notes.append(f"Bazel {bazel.version} is not pinned ({bazel.known}): {bazel.sha256}.")
    troubles = dict.fromkeys(one["cache_trouble"] for one in records if one["cache_trouble"])
    notes += [f"The remote cache was of no use: {trouble}." for trouble in troubles]
    total = sum(one["bytes"] for one in records)
    single = records[0] if len(records) == 1 else None
    return Outcome(
        "unchanged" if all(one["unchanged"] for one in records) else "done",
        f"{Path(single['wheel']).name}, {size(total)}, sha256 {single['sha256']}, {single['audit']}"
        if single
        else f"{len(records)} wheels, {size(total)}",
        {
            "wheels": records,
            "source": {
                "path": str(source.path),
                "commit": source.commit,
                "ref": source.ref,
                "repository": source.repository,
                "verified": source.verified,
                "dirty": source.dirty,
                "changes": list(source.changes),
                "tree_sha256": source.tree_sha256,
            },
            "bazelisk": {"origin": place.tool.origin, "sha256": place.tool.sha256},
            "bazel": {"version": bazel.version, "sha256": bazel.sha256, "known": bazel.known},
            "where": place.name,
            "image": place.image,
            "remote": settled.run.plan.remote.kind,
        },
        notes,
        text="" if single else "\n".join(rows),
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    # what is not a number is never within limits
    if not 0 < hours <= _HOURS_MOST:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0 and up to {_HOURS_MOST}")
    return hours


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        Its exit code.
    """
    arguments = parser(VERB, "Build the TorchTPU wheel from source with Bazelisk.")
    which = arguments.add_mutually_exclusive_group()
    which.add_argument("--source", metavar="DIR", help="a checkout of TorchTPU of your own")
    which.add_argument(
        "--ref", metavar="REF", help="a tag, branch or commit to fetch (default: the pinned one)"
    )
    arguments.add_argument(
        "--repository", metavar="URL", help="fetch from a mirror or fork instead of upstream"
    )
    arguments.add_argument(
        "--allow-dirty", action="store_true", help="build a --source that differs from its commit"
    )
    arguments.add_argument(
        "--python",
        metavar="X.Y",
        nargs="+",
        help="the Pythons to build for, or all (default: lock/pins.toml's)",
    )
    version = arguments.add_mutually_exclusive_group()
    version.add_argument(
        "--release", action="store_true", help="no suffix to the version (the default)"
    )
    version.add_argument(
        "--dev", action="store_true", help="the suffix .devYYYYMMDDHHMMSS, the time of the commit"
    )
    version.add_argument("--suffix", metavar=".devN", help="this suffix")
    arguments.add_argument(
        "--remote",
        default="none",
        metavar="KIND",
        help="none, cache=URL, executor=URL or public-cache (upstream's, read-only)",
    )
    arguments.add_argument(
        "--instance", default="", metavar="NAME", help="instance name at that remote"
    )
    arguments.add_argument(
        "--credentials", metavar="FILE", help="Google credentials for that remote, or: google"
    )
    arguments.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="NAME",
        help="a further configuration of the source's .bazelrc, such as wheel_release",
    )
    arguments.add_argument(
        "--jobs", type=_positive, metavar="N", help="actions at once (default: Bazel's own choice)"
    )
    arguments.add_argument(
        "--keep-going", action="store_true", help="after a failure go on with the rest"
    )
    arguments.add_argument(
        "--where",
        choices=("host", "container"),
        help="build here or in the builder image (default: the image, where there is an engine)",
    )
    arguments.add_argument(
        "--cache", metavar="DIR", help="where Bazel keeps what it keeps (default: out/bazel)"
    )
    arguments.add_argument("--bazelisk", metavar="PATH", help="the native Bazelisk to run")
    arguments.add_argument(
        "--bazel", metavar="VERSION_OR_PATH", help="the Bazel that Bazelisk is to run"
    )
    arguments.add_argument(
        "--bazel-url", metavar="URL", help="where Bazelisk gets Bazel instead of its own default"
    )
    arguments.add_argument(
        "--limit-hours",
        type=_hours,
        default=12.0,
        metavar="N",
        help="end a build after N hours (default: 12)",
    )
    arguments.add_argument(
        "--dry-run", action="store_true", help="print the figures and the lines, run nothing"
    )
    return run_verb(VERB, arguments, build, argv)


if __name__ == "__main__":
    raise SystemExit(main())

"""Run a command of an image the way a careful user would, and bring its results home.

What ``smoke`` and ``bench`` share: which image, which engine, whether the engine holds exactly
that image, one container per run with no rights and no network, and results that stand in ``out/``
only when they are complete. The container has a time limit of its own, so that even a run that was
killed beyond repair ends by itself; the next run removes what is left of it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import secrets
import shlex
import shutil
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuforge.baked import read_baked
from tpuforge.console import Progress, duration
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import (
    ROOT,
    exclusive,
    out_dir,
    read_json,
    sha256_file,
    sha256_text,
    write_atomic,
    write_json,
)
from tpuforge.pins import load
from tpuforge.process import Completed, clean_env, run
from tpuforge.verb import add_image

# what is read of an image's record
_RECORD = dict.fromkeys(
    ("name", "flavour", "python", "manifest_digest", "config_digest", "lock_sha256"), str
)
ENGINE_SCHEMA = "tpuforge.engine/1"
RUN_SCHEMA = "tpuforge.run/1"
RESULTS = "/results"
"""Where a container finds the folder that it may write to."""
MEMORY = "6g"
"""Limit of one container: three times what a single check may take (2 GB), and some for /tmp."""
_LABEL = "io.tpuforge.run"
_HOLD = "tpuforge/running"
_FACTS = (
    "{{.Id}}{{with .Config}} "
    '{{index .Labels "io.tpuforge.suite.sha256"}} {{index .Labels "io.tpuforge.python"}}{{end}}'
)
"""What an engine is asked about an image that was not baked here: digest, suite, Python."""
_VERBS = {"health": "smoke", "bench": "bench", "operators": "operators", "model": "model"}
"""Module of this package to the verb that it is."""
_TOO_LATE = 124
_OUT_OF_MEMORY = 137
_ENGINE_FAILED = 125
_NOT_RUNNABLE = (126, 127)
_NOT_THE_COMMANDS = (_TOO_LATE, _ENGINE_FAILED, *_NOT_RUNNABLE, _OUT_OF_MEMORY)


@dataclass(frozen=True)
class Subject:
    """The image that is run.

    Attributes:
        slug: Its folder name in ``out/``, such as ``runtime-py311``.
        reference: Its name for people.
        digests: Digests an engine may know it by: manifest, then configuration.
        layout: Its OCI layout; None for an image that the engine holds already.
        suite: Digest of the health suite in it; empty if the image does not say.
        python: Its Python, ``X.Y``; None if the image does not say.
    """

    slug: str
    reference: str
    digests: tuple[str, ...]
    layout: Path | None
    suite: str = ""
    python: str | None = None

    @property
    def digest(self) -> str:
        """The manifest digest."""
        return self.digests[0]


@dataclass(frozen=True)
class Engine:
    """A Docker engine that answers.

    Attributes:
        docker: The client.
        env: How it reaches the engine, such as ``DOCKER_HOST``.
        init: Whether the engine has an init process for containers (Debian splits it off).
    """

    docker: str
    env: Mapping[str, str]
    init: bool = True

    def call(
        self, *words: str | Path, timeout: float = 60, check: bool = True, **more: Any
    ) -> Completed:
        """Run the client (see :func:`tpuforge.process.run`).

        Args:
            *words: Its arguments.
            timeout: Seconds.
            check: Raise when it fails.
            **more: Further arguments of ``run``.
        """
        env = clean_env(**self.env)
        return run([self.docker, *words], timeout=timeout, env=env, check=check, **more)


@dataclass(frozen=True)
class Mount:
    """A host path in a container, read-only unless said otherwise.

    Attributes:
        source: Absolute host path.
        target: Path in the container.
        writable: Whether the container may write to it.
    """

    source: Path
    target: str
    writable: bool = False

    def argument(self) -> str:
        """The value of ``--mount``: a line of CSV, so any character can stand in a path."""
        fields = ["type=bind", f"source={self.source}", f"target={self.target}"]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(
            fields if self.writable else [*fields, "readonly"]
        )
        return line.getvalue()


@dataclass(frozen=True)
class Job:
    """One container run.

    Attributes:
        command: The command in the image and its arguments.
        limit: Seconds.
        mounts: Beside the results folder.
        env: Variables to set.
        options: More options of ``docker run``.
    """

    command: Sequence[str]
    limit: float
    mounts: Sequence[Mount] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()


SIMULATOR_ENV = {
    "TPU_LIBRARY_PATH": "/opt/simulator/wrapper.so",
    "TPUFORGE_SIMULATOR": "/opt/simulator",
}
"""What makes torch_tpu load the simulator's plugin, and the suite know of it."""


def simulator_mounts(folder: Path) -> tuple[Mount, ...]:
    """The mounts that show a container a simulated chip.

    Args:
        folder: A simulator that :mod:`tpuforge.smoke.simulator` made.
    """
    return (
        Mount(folder, "/opt/simulator"),
        Mount(folder / "pci", "/sys/bus/pci/devices"),
        Mount(folder / "vfio", "/dev/vfio/7"),
    )


def add_choice(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the options that name an image.

    Args:
        parser: A verb's parser.
        several: Take more than one; ``image`` and ``image_ref`` are then lists, or None.
    """
    add_image(parser, several=several)
    parser.add_argument(
        "--image-ref",
        action="append" if several else "store",
        metavar="REF",
        help="run this image of the engine, wherever it came from, instead of a baked one"
        + ("; again for more" if several else ""),
    )


def slug(options: argparse.Namespace) -> str:
    """The folder name in ``out/`` of the image that the options name.

    Args:
        options: With ``image``, ``python`` and ``image_ref``.

    Returns:
        Such as ``runtime-py311``; ``ref`` for an image that was named by its reference.

    Raises:
        ForgeError: If that Python is not supported, or the pins are bad.
    """
    if options.image_ref:
        return "ref"
    pins = load()
    python = pins.python(options.python)
    return f"{options.image or pins.default_image}-py{python.replace('.', '')}"


def baked(options: argparse.Namespace) -> Subject:
    """The baked image that the options name.

    Args:
        options: With ``image``, ``python`` and ``flavour``.

    Returns:
        The image.

    Raises:
        ForgeError: If it was not baked, its record is damaged, or it has another flavour.
    """
    name = slug(options)
    record = read_baked(name, _RECORD, options.flavour)
    digests = (record["manifest_digest"], record["config_digest"])
    layout = out_dir() / "images" / name / "oci"
    suite = str(record.get("suite_sha256") or "")
    return Subject(name, record["name"], digests, layout, suite, record["python"])


def referenced(engine: Engine, reference: str) -> Subject:
    """An image that the engine holds under some name.

    Args:
        engine: The engine.
        reference: The name, digest or id.

    Returns:
        The image; its results get a folder of their own.

    Raises:
        ForgeError: If the engine holds no such image.
    """
    said = _identify(engine, reference, _FACTS)
    if said is None:
        raise ForgeError(
            f"the engine holds no image {reference}",
            expected="an image of the engine",
            mend=f"docker pull {reference}, or leave out --image-ref for the baked image",
        )
    found, suite, python = (*said.split(" "), "", "")[:3]
    slug = f"ref-{found.removeprefix('sha256:')[:12]}"
    return Subject(slug, reference, (found,), None, suite, python or None)


def chosen(
    options: argparse.Namespace, progress: Progress, engine: Engine | None = None
) -> tuple[Engine | None, Subject]:
    """The image that the options name, and an engine if only an engine can know the image.

    Args:
        options: With ``image``, ``python``, ``flavour`` and ``image_ref``.
        progress: Shows what is done.
        engine: An engine that was found already.

    Returns:
        The engine, None as long as none was needed, and the image.

    Raises:
        ForgeError: See :func:`baked`, :func:`find_engine` and :func:`referenced`.
    """
    if not options.image_ref:
        return engine, baked(options)
    engine = engine or find_engine(progress)
    return engine, referenced(engine, options.image_ref)


def find_engine(progress: Progress) -> Engine:
    """The engine that the bake used, or whatever ``./forge engine`` finds now.

    Args:
        progress: Shows what is done.

    Returns:
        An engine that answered.

    Raises:
        ForgeError: If there is none.
    """
    engine = _recorded()
    if engine is not None and _answers(engine):
        return engine
    with progress.step("looking for a Docker engine"):
        # which engine is the user's own choice, and that verb is who honours it
        chosen = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("DOCKER_", "TPUFORGE_"))
        }
        done = run(
            [sys.executable, "-m", "tpuforge.images.engine", "--json"],
            timeout=900,
            env=clean_env(PYTHONPATH=str(ROOT / "src"), **chosen),
            on_line=progress.detail,
            check=False,
        )
    engine = _recorded()
    if done.code != 0 or engine is None or not _answers(engine):
        error = _error_in(done.output)
        raise ForgeError(
            error.get("found") or f"no Docker engine answers\n{done.tail}",
            expected=error.get("expected") or "an engine that answers",
            mend=error.get("mend") or "./forge engine",
        )
    return engine


def _recorded() -> Engine | None:
    record = read_json(out_dir() / "engine" / "engine.json")
    if not isinstance(record, dict) or record.get("schema") != ENGINE_SCHEMA:
        return None
    docker, env, init = record.get("docker"), record.get("env", {}), record.get("init", True)
    if not (docker and isinstance(docker, str) and isinstance(env, dict) and type(init) is bool):
        return None
    return Engine(docker, {key: str(value) for key, value in env.items()}, init)


def _answers(engine: Engine) -> bool:
    try:
        done = engine.call("version", "--format", "{{.Server.Version}}", timeout=20, check=False)
    except ForgeError:
        return False
    return done.code == 0


def _error_in(output: str) -> dict[str, str]:
    """The error of a verb that was asked for JSON; its output may hold other lines as well."""
    with contextlib.suppress(ValueError):
        record = json.loads(output[output.index("{") : output.rindex("}") + 1])
        error = record.get("error")
        if isinstance(error, dict):
            return {key: str(value) for key, value in error.items()}
    return {}


@contextlib.contextmanager
def loaded(engine: Engine, subject: Subject, progress: Progress) -> Iterator[str]:
    """Make sure that the engine holds exactly this image, and goes on holding it.

    The image is asked for by digest, never by name: a name may have moved on. Meanwhile it gets a
    name of its own, or the next bake, which takes its name away, would take it from under a run.

    Args:
        engine: The engine.
        subject: The image.
        progress: Shows what is done.

    Yields:
        The digest to run it by.

    Raises:
        ForgeError: If the engine does not end up with exactly that image; exit code 1 when its
            bytes are not those that ``image.json`` names.
    """
    if subject.layout is None:
        # a user's own image: the engine knew it by digest a moment ago, and names are theirs
        yield subject.digest
        return
    # one name per run and image: another image of the same run ends at another time
    name = f"{_HOLD}:{_owner()}-{subject.slug}"
    digest = _held(engine, subject)
    if digest is None or not _tag(engine, digest, name):
        _load(engine, subject, subject.layout, progress)
        digest = _held(engine, subject)
    if digest is None or not _tag(engine, digest, name):
        raise ForgeError(
            f"the engine does not hold {subject.reference} with the digest {subject.digest}",
            expected="the image that image.json names, bit for bit",
            mend="./forge bake, then ./forge smoke again",
            exit_code=Exit.FAULT,
        )
    try:
        yield digest
    finally:
        engine.call("rmi", "--no-prune", name, check=False)


def _tag(engine: Engine, digest: str, name: str) -> bool:
    return engine.call("tag", digest, name, check=False).code == 0


def _held(engine: Engine, subject: Subject) -> str | None:
    for digest in subject.digests:
        if _identify(engine, digest) == digest:
            return digest
    return None


def _identify(engine: Engine, reference: str, what: str = "{{.Id}}") -> str | None:
    """The id an engine gives an image: its manifest's digest, or its configuration's."""
    done = engine.call("image", "inspect", "--format", what, reference, check=False)
    if done.code == 0:
        return done.output.strip().splitlines()[-1]
    if "no such image" in done.output.lower():
        return None
    raise ForgeError(
        f"the engine cannot be asked for {reference}\n{done.tail}",
        expected="an engine that answers",
        mend="./forge engine",
    )


def _load(engine: Engine, subject: Subject, layout: Path, progress: Progress) -> None:
    """Stream an OCI layout into the engine."""
    try:
        members, extra, total = _archive(layout, subject)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ForgeError(
            f"{layout} is not the OCI layout of {subject.reference}: {error}",
            expected=f"a layout that holds {subject.digest}",
            # without it a bake looks at times and sizes alone
            mend=f"./forge bake --no-cache --image {subject.slug.partition('-py')[0]}"
            + (f" --python {subject.python}" if subject.python else ""),
            exit_code=Exit.FAULT,
        ) from error
    read, write = os.pipe()
    lost: list[OSError] = []

    def feed() -> None:
        # the client may end early; its own message says why
        try:
            with (
                contextlib.suppress(BrokenPipeError),
                os.fdopen(write, "wb") as pipe,
                tarfile.open(mode="w|", fileobj=pipe) as tar,
            ):
                for name, data in extra.items():
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
                for name in members:
                    path = layout / name
                    tar.add(path, name, recursive=False)
                    progress.advance(path.stat().st_size)
        except OSError as error:
            # handed to the thread that waits: another bake may have replaced the layout
            lost.append(error)

    feeder = threading.Thread(target=feed, daemon=True)
    with progress.step(f"loading {subject.reference} into the engine", total):
        feeder.start()
        try:
            done = engine.call("load", timeout=900, stdin=read, check=False)
        finally:
            os.close(read)
            feeder.join(timeout=30)
    if lost or done.code != 0:
        # containerd's store names an image before it has all of it, and would be believed next time
        engine.call("rmi", subject.reference, check=False)
    if lost:
        raise ForgeError(
            f"the layout of {subject.reference} was lost while it was read: {lost[0]}",
            expected=f"{layout}, and nobody who replaces or removes it meanwhile",
            mend="./forge bake, then the same command again",
        ) from lost[0]
    if done.code != 0:
        raise ForgeError(
            f"the engine does not take {subject.reference}\n{done.tail}",
            expected="an engine with space that loads an OCI layout",
            mend="free some space (docker system df), ./forge bake, then the same command again",
        )


def _archive(layout: Path, subject: Subject) -> tuple[list[str], dict[str, bytes], int]:
    """Blobs of an image, the small files around them, and the sum of the blobs' bytes.

    The small files make one archive for both image stores: ``index.json`` for containerd's,
    ``manifest.json`` for the classic one.
    """
    manifest_blob = _blob(subject.digest)
    manifest = json.loads((layout / manifest_blob).read_bytes())
    config = _blob(manifest["config"]["digest"])
    layers = [_blob(layer["digest"]) for layer in manifest["layers"]]
    members = list(dict.fromkeys([manifest_blob, config, *layers]))
    for name in members:
        if sha256_file(layout / name) != name.rpartition("/")[2]:
            raise ValueError(f"{name} has another digest than its name")
    total = sum((layout / name).stat().st_size for name in members)
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {
                "mediaType": manifest["mediaType"],
                "digest": subject.digest,
                "size": (layout / manifest_blob).stat().st_size,
                "platform": {"os": "linux", "architecture": "amd64"},
                "annotations": {"io.containerd.image.name": _full_name(subject.reference)},
            }
        ],
    }
    classic = [{"Config": config, "RepoTags": [subject.reference], "Layers": layers}]
    extra = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        "manifest.json": json.dumps(classic).encode(),
    }
    return members, extra, total


def _blob(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or len(value) != 64 or not value.isalnum():
        raise ValueError(f"{digest!r} is no digest")
    return f"blobs/sha256/{value}"


def _full_name(reference: str) -> str:
    """A reference with its registry, as containerd's store keeps it."""
    first, slash, _ = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return reference
    return f"docker.io/{reference}" if slash else f"docker.io/library/{reference}"


@dataclass(frozen=True)
class Room:
    """Where containers of one image are run, and their results come home.

    Attributes:
        engine: The engine.
        digest: The image, by digest.
        results: The folder that containers may write to, mounted at :data:`RESULTS`.
        progress: Shows the last line of their output.
        stop: Ends the running container when it is set.
    """

    engine: Engine
    digest: str
    results: Path
    progress: Progress
    stop: threading.Event | None = None

    def run(self, job: Job) -> Completed:
        """Run one command in a fresh container: no network, no rights, no writable root.

        Args:
            job: What to run.

        Returns:
            The ended container; the meaning of its exit code is the command's own.

        Raises:
            ForgeError: If the container could not be run to its end.
        """
        name = f"tpuforge-{secrets.token_hex(8)}"
        words: list[str | Path] = [
            *("run", "--rm", "--name", name, "--label", f"{_LABEL}={_owner()}"),
            # without one, "timeout" is the first process, and passes signals on as well
            *(["--init"] if self.engine.init else []),
            *("--network=none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"),  # noqa: S108
            *("--security-opt", "no-new-privileges", "--memory", MEMORY, "--pull", "never"),
            *job.options,
        ]
        for mount in (Mount(self.results, RESULTS, writable=True), *job.mounts):
            words += ["--mount", mount.argument()]
        for key, value in job.env.items():
            words += ["--env", f"{key}={value}"]
        # the container ends itself at its limit; the client is given time to see that
        words += [self.digest, "timeout", "--kill-after=10", f"{job.limit:.0f}", *job.command]
        ended = False
        try:
            done = self.engine.call(
                *words,
                timeout=job.limit + 60,
                check=False,
                on_line=self.progress.detail,
                doing=f"{job.command[0]} in the image",
                stop=self.stop,
            )
            ended = True
        finally:
            if not ended:
                # the end of a client does not end its container
                with contextlib.suppress(ForgeError):
                    self.engine.call("rm", "--force", name, check=False)
        if done.code < 0 or done.code in _NOT_THE_COMMANDS:
            raise _not_run(done, job)
        return done


def clear(engine: Engine, kind: str) -> None:
    """Remove what an earlier, killed run left: its containers and its folders.

    Args:
        engine: The engine.
        kind: ``health`` or ``bench``.
    """
    _sweep(engine)
    for old in (out_dir() / kind).glob(".run-*"):
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def room(
    engine: Engine,
    digest: str,
    kind: str,
    progress: Progress,
    stop: threading.Event | None = None,
) -> Iterator[Room]:
    """Make a room for container runs; afterwards it is gone, and containers of it are too.

    Only its owner can reach its folder, and within that every user may write: an image's user has
    a number that this machine does not know.

    Args:
        engine: The engine.
        digest: The image, by digest.
        kind: ``health`` or ``bench``; the folder stands in ``out/KIND``.
        progress: Shows what is done.
        stop: Ends its running container when it is set: for a thread that no signal reaches.

    Yields:
        The room.
    """
    parent = out_dir() / kind
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".run-", dir=parent))
    results = folder / "results"
    try:
        results.mkdir()
        results.chmod(0o777)
        yield Room(engine, digest, results, progress, stop)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _owner() -> str:
    return sha256_text(str(out_dir()))[:16]


def _sweep(engine: Engine) -> None:
    """Remove containers that an earlier, killed run of this out folder left behind."""
    done = engine.call("ps", "--all", "--quiet", "--filter", f"label={_LABEL}={_owner()}")
    if left := done.output.split():
        engine.call("rm", "--force", *left)


def _not_run(done: Completed, job: Job) -> ForgeError:
    what = job.command[0]
    if done.code == _TOO_LATE:
        return ForgeError(
            f"{what} was not done after {job.limit:.0f} s and was ended\n{done.tail}",
            expected="a machine that is not overloaded",
            mend=f"try again when the machine is idle: ./forge {what}",
        )
    if done.code == _OUT_OF_MEMORY:
        return ForgeError(
            f"{what} was killed, most likely for want of memory (limit {MEMORY})\n{done.tail}",
            expected="some 4 GB of free memory",
            mend="free some memory, then run the same command again",
        )
    if done.code in _NOT_RUNNABLE:
        return ForgeError(
            f"the image has no command {what}\n{done.tail}",
            expected="an image that ./forge bake made",
            mend="./forge bake",
            exit_code=Exit.FAULT,
        )
    return ForgeError(
        f"the engine could not run the container\n{done.tail}",
        expected="a healthy engine",
        mend="./forge engine, then run the same command again",
    )


@contextlib.contextmanager
def turn(progress: Progress) -> Iterator[None]:
    """Be the only one that runs images; wait for who does, and show for whom and how long.

    Args:
        progress: Where the wait is shown; that there is one, to a machine's reader as well.

    Yields:
        Nothing.
    """
    with contextlib.ExitStack() as waiting:

        def say(who: str) -> None:
            doing = _doing(who)
            words = f"waiting for {doing}"
            progress.note(f"{words}, and only one at a time may run images", always=True)
            waiting.enter_context(progress.step(words))

        with exclusive("smoke", say):
            waiting.close()
            yield


def _doing(who: str) -> str:
    """A process with the command that it runs, if it is one of the project's.

    Args:
        who: Such as ``process 1376``.
    """
    try:
        line = Path("/proc", who.rpartition(" ")[2], "cmdline").read_bytes()
    except OSError:
        return who
    words = line.decode("utf-8", "replace").rstrip("\0").split("\0")
    for place, word in enumerate(words):
        module = word.removesuffix(".py").replace("/", ".").rpartition("tpuforge.smoke.")[2]
        if module in _VERBS:
            return f"{who} ({shlex.join([_VERBS[module], *words[place + 1 :]])})"
    return who


@contextlib.contextmanager
def shelf() -> Iterator[None]:
    """Hold the results that stand in ``out/``, for as long as files are read or put there.

    It is not :func:`turn`: who finds all that it wants here waits for no run.

    Yields:
        Nothing.
    """
    with exclusive("smoke-results"):
        yield


def key_of(inputs: Mapping[str, str]) -> str:
    """The key of a run: one hash of everything that decides what it finds.

    Args:
        inputs: Name for people to value.
    """
    return sha256_text(RUN_SCHEMA, *(text for pair in sorted(inputs.items()) for text in pair))


def changes(folder: Path, inputs: Mapping[str, str]) -> str:
    """What is different from the last run, for people.

    Args:
        folder: Where the results stand.
        inputs: The inputs of this run.

    Returns:
        Such as ``the image changed since the last run``; empty when nothing is, or can be, known.
    """
    record = read_json(folder / "run.json")
    before = record.get("inputs") if isinstance(record, dict) else None
    if not isinstance(before, dict):
        return ""
    names = [name for name in inputs if before.get(name) != inputs[name]]
    return f"{' and '.join(names)} changed since the last run" if names else ""


def earlier(folder: Path, files: Sequence[str], key: str) -> dict[str, Any] | None:
    """The record of an earlier run with the same inputs, if its results are whole.

    Args:
        folder: Where the results stand.
        files: Their names; the first is the one that the record vouches for.
        key: Hash of all inputs.

    Returns:
        The record, or None.
    """
    record = read_json(folder / "run.json")
    if not isinstance(record, dict) or record.get("key") != key:
        return None
    if not isinstance(record.get("exit_code"), int):
        return None
    if not isinstance(record.get("seconds"), int | float):
        return None
    if not isinstance(record.get("notes", []), list):
        return None
    try:
        whole = sha256_file(folder / files[0]) == record.get("sha256")
        whole = whole and all((folder / name).is_file() for name in files)
    except OSError:
        return None
    return record if whole else None


def as_before(record: Mapping[str, Any]) -> str:
    """What a verb adds to its summary when it shows an earlier run again.

    Args:
        record: That run's ``run.json``.
    """
    return (
        " (same image, simulator and options as in the last run, which took "
        f"{duration(record['seconds'])})"
    )


def publish(folder: Path, files: Mapping[str, Path], record: Any) -> None:
    """Put the results of a run into their place; the record comes last and vouches for them.

    Args:
        folder: Where they stand afterwards.
        files: Final name to present path; the record vouches for the first.
        record: Facts of the run.

    Raises:
        ForgeError: If a file is missing or is no plain file.
    """
    for name, path in files.items():
        if path.is_symlink() or not path.is_file():
            raise ForgeError(
                f"the image's command left no {name}",
                expected=f"the results {', '.join(files)}",
                mend="./forge bake",
                exit_code=Exit.FAULT,
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").unlink(missing_ok=True)
    for name, path in files.items():
        write_atomic(folder / name, path.read_bytes())
    whole = {"schema": RUN_SCHEMA, **record, "sha256": sha256_file(folder / next(iter(files)))}
    write_json(folder / "run.json", whole)

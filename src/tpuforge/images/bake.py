"""``bake``: make an image from the base and the wheelhouse, offline, the same bytes every time.

The image is written as an OCI layout to ``out/images/<image>-py<XY>/oci`` and stands in the engine
under its tag, with one and the same manifest digest. ``image.json`` beside the layout is written
last: it names the manifest, so an interrupted bake leaves the image of before as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import io
import os
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from tpuforge import layout as oci
from tpuforge.console import Progress, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import bare, budget, builder, context, overlay, simulation
from tpuforge.images.base import ensure_base, named_base
from tpuforge.images.choice import (
    ONE_FOR_ALL,
    choose,
    images,
    lacks,
    member_target,
    members,
    recipe,
)
from tpuforge.images.context import IMAGES, MORE, Inputs, Target, base_set
from tpuforge.images.engine import ensure_engine
from tpuforge.images.overlay import read_wheel
from tpuforge.paths import exclusive, out_dir, write_atomic, write_json
from tpuforge.pins import Pins, load
from tpuforge.process import Completed, clean_env, run
from tpuforge.records import read_record
from tpuforge.revision import Revision, revision
from tpuforge.verb import Outcome, add_image, main_of, parser

__all__ = ["SCHEMA", "bake", "choose", "explain", "images", "main", "read_finished", "recipe"]

VERB = "bake"
SCHEMA = "tpuforge.image/1"
# One level for ever: BuildKit keeps a blob it has already compressed, whatever level is asked for
# later. 9 and more save an eighth of the size and take six times as long.
_COMPRESSION = ("compression=zstd", "compression-level=3", "force-compression=true")
# for pullers from before zstd: the same image, with its layers in the older compression
_FALLBACK = ("compression=gzip", "force-compression=true")
GZIP = "-gzip"
"""What the tag of that fallback adds to the image's own."""

_BAKE_S = 3600.0
_LOAD_S = 900.0
_ASK_S = 60.0
_LOOK_S = 0.2
# what this module reads back from image.json
_FORM = {
    "image": str,
    "name": str,
    "manifest_digest": str,
    "config_digest": str,
    "compressed_bytes": int,
    "unpacked_bytes": int,
    "layers": [{"digest": str, "compressed_bytes": int, "unpacked_bytes": int, "what": str}],
    "key": str,
    "inputs": dict,
    "source": dict,
    "notes": [str],
    "run_line": str,
}
_STAGE = re.compile(r"#\d+ \[(?P<stage>[^\]]+)\]")
_EXPORT = re.compile(r"#\d+ (?P<what>(?:exporting|unpacking|merging|copying|naming)\b.*)")


@dataclass(frozen=True)
class Base:
    """What the image stands on.

    Attributes:
        context: The named context of buildx.
        digest: The manifest's digest.
        name: What it is called.
        notes: What the report must say of it.
    """

    context: str
    digest: str
    name: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """One bake.

    Attributes:
        target: The image.
        pins: The pins.
        inputs: What it is made of.
        engine: The record of the engine (``out/engine/engine.json``).
        base: What it stands on.
        progress: Told what happens.
        load: Whether the engine is to have the image too.
        source: The commit that it is made from.
    """

    target: Target
    pins: Pins
    inputs: Inputs
    engine: Mapping[str, Any]
    base: Base
    progress: Progress
    load: bool
    source: Revision

    @property
    def layout(self) -> Path:
        """Where BuildKit writes; nobody else reads it."""
        return self.target.work / "oci"


def bake(
    target: Target,
    pins: Pins,
    progress: Progress,
    *,
    no_cache: bool = False,
    release: bool = False,
    base: str | None = None,
    load: bool = True,
    fallback: bool = False,
) -> Outcome:
    """Have an image: bake it, or say that it is there.

    Args:
        target: The image.
        pins: The pins.
        progress: Told what happens.
        no_cache: Take nothing from BuildKit's cache.
        release: Refuse a base that is not exactly the locked one.
        base: ``docker-image://…@sha256:…`` instead of the Debian base.
        load: Put the image into the engine too, under its tag.
        fallback: Have it with layers in gzip too, as a second layout.

    Returns:
        What was done.

    Raises:
        ForgeError: If an input is missing or bad, or the bake fails.
    """
    how = recipe(target)
    # what can be wrong in a second is looked at before what takes a minute
    place = target.finished / "image.json"
    if place.is_dir():
        raise ForgeError(
            f"{place} is a folder",
            expected="the record of an image, or nothing",
            mend=f"look at what is in it, then: rm -r {shlex.quote(str(place))}",
        )
    inputs = how.read_inputs(target, pins)
    record = read_finished(target)
    if record is None or record["inputs"] != inputs.parts:
        try:
            context.wheels(target, inputs)
        except ForgeError:
            if record is not None:
                progress.note(f"{target.name} has to be baked again: {_changed(record, inputs)}")
            raise
    engine = ensure_engine(progress)
    with exclusive(
        f"bake-{target.slug}", lambda who: progress.note(f"waiting for {who}, which bakes this")
    ):
        ground = _base(target, pins, progress, release=release, named=base, verify=False)
        # only now: waiting and making a base take long enough for someone to edit a file
        inputs = how.read_inputs(target, pins)
        source = revision()
        key = inputs.key(ground.digest)
        record = read_finished(target)
        why = "asked for with --no-cache" if no_cache else _stale(target, record, key, inputs)
        if not why and record is not None:
            loaded: bool | None = not load or _in_engine(engine, record)
            if not loaded:
                _load(engine, target, target.finished / "oci", progress)
            _refresh(target, record, engine, source)
            if fallback and not _has_fallback(target, record):
                how.prepare(target, inputs, pins, progress)
                ground = _base(target, pins, progress, release=release, named=base, verify=True)
                _fall_back(
                    Job(target, pins, inputs, engine, ground, progress, load, source), record
                )
                loaded = None
            return _outcome(record, loaded=loaded)
        progress.note(f"baking {target.name}: {why}")
        how.prepare(target, inputs, pins, progress)
        ground = _base(target, pins, progress, release=release, named=base, verify=True)
        job = Job(target, pins, inputs, engine, ground, progress, load, source)
        image, contents = _build(job, no_cache=no_cache)
        try:
            _judge(job, image, contents, record)
        except ForgeError:
            _take_back(job, record)
            raise
        record = _record(job, image, contents)
        if load and not _in_engine(engine, record):
            _load(engine, target, job.layout, progress)
        oci.publish(job.layout, target.finished / "oci", image, target.name)
        own_lock = target.finished / "lock.txt"
        if inputs.overlay:
            write_atomic(own_lock, inputs.overlay)
        else:
            own_lock.unlink(missing_ok=True)
        write_json(target.finished / "image.json", record)
        oci.prune(target.finished / "oci", image)
        oci.prune(job.layout, image)
        if fallback:
            _fall_back(job, record)
        else:
            # that of another image
            shutil.rmtree(target.finished / f"oci{GZIP}", ignore_errors=True)
        return _outcome(record)


def _judge(
    job: Job,
    image: oci.Image,
    contents: Sequence[oci.Content],
    record: Mapping[str, Any] | None,
) -> None:
    """Refuse an image that is over its budget, or that holds a layer twice."""
    digests = [layer.digest for layer in image.layers]
    twice = {one for one in digests if digests.count(one) > 1}
    if twice:
        raise ForgeError(
            f"{job.target.name} has a layer twice: {', '.join(sorted(twice))}",
            expected="every layer once",
            mend="see which stages of images/Dockerfile gather the same files",
            exit_code=Exit.FAULT,
        )
    unpacked = sum(content.unpacked for content in contents)
    before = {layer["digest"] for layer in record["layers"]} if record is not None else set()
    budget.check(job.layout, image, unpacked, before, job.target.name)


def _take_back(job: Job, record: Mapping[str, Any] | None) -> None:
    """Leave the engine as it was before an image that is refused."""
    if not (job.load and _shares_store(job.engine)):
        return
    if record is not None and not oci.missing(
        job.target.finished / "oci", oci.read_image(job.target.finished / "oci")
    ):
        _load(job.engine, job.target, job.target.finished / "oci", job.progress)
        return
    gone = ["image", "rm", job.target.name]
    _docker(job.engine, *gone, timeout=_ASK_S, check=False, doing=f"removing {job.target.name}")


def _has_fallback(target: Target, record: Mapping[str, Any]) -> bool:
    """Whether the image is there with layers in gzip too, whole."""
    told = record.get("gzip")
    folder = target.finished / f"oci{GZIP}"
    try:
        image = oci.read_image(folder)
    except ForgeError:
        return False
    known = isinstance(told, dict) and told.get("manifest_digest") == image.manifest.digest
    return (
        known and image.config.digest == record["config_digest"] and not oci.missing(folder, image)
    )


def _fall_back(job: Job, record: dict[str, Any]) -> None:
    """Write the image once more, with layers in gzip, and note it in the record."""
    target = job.target
    layout, name = target.work / f"oci{GZIP}", f"{target.name}{GZIP}"
    with _alone(job) as lock:
        (layout / "index.json").unlink(missing_ok=True)
        shutil.rmtree(layout / "ingest", ignore_errors=True)
        outputs = [_fields("type=oci", "tar=false", f"dest={layout}", *_FALLBACK)]
        _run_bake(job, lock, outputs, no_cache=False)
    image = oci.read_image(layout)
    bad = oci.wrong(layout, image)
    for blob in bad:
        blob.path(layout).unlink(missing_ok=True)
    if bad or image.config.digest != record["config_digest"]:
        raise ForgeError(
            f"{name} is not the same image: {len(bad)} damaged blobs, config {image.config.digest}",
            expected=f"the config {record['config_digest']}, in other layers of the same content",
            mend="./forge bake --no-cache --gzip",
            exit_code=Exit.FAULT,
        )
    oci.publish(layout, target.finished / layout.name, image, name)
    oci.prune(target.finished / layout.name, image)
    oci.prune(layout, image)
    record["gzip"] = {
        "name": name,
        "manifest_digest": image.manifest.digest,
        "compressed_bytes": image.compressed,
    }
    write_json(target.finished / "image.json", record)


def _base(
    target: Target,
    pins: Pins,
    progress: Progress,
    *,
    release: bool,
    named: str | None,
    verify: bool,
) -> Base:
    if named:
        provider = named_base(named)
        name, _, digest = provider.removeprefix("docker-image://").rpartition("@")
        return Base(provider, digest, name, (f"the base is {provider}",))
    suite = base_set(target, pins)
    record = ensure_base(suite, pins, progress, release=release, verify=verify)
    digest = record["manifest_digest"]
    notes: tuple[str, ...] = ()
    if record["drift"]:
        names = ", ".join(str(item) for item in record["drift"])
        notes = (f"the base has other package versions than its lock: {names}",)
    name = f"tpuforge/debian:{suite.label}"
    return Base(f"oci-layout://{_place(record['layout'])}@{digest}", digest, name, notes)


def _place(layout: str) -> str:
    """The path of a base as buildx takes it: what follows the first @ is the digest for it.

    Raises:
        ForgeError: If the out folder cannot be named so, or not in UTF-8.
    """
    path = out_dir() / layout
    if os.fsencode(path).decode("utf-8", "ignore") != str(path):
        # what it is told in JSON would be another name
        raise ForgeError(
            f"buildx cannot be told of {path}: its name is not UTF-8",
            expected="an out folder with a name in UTF-8",
            mend="set TPUFORGE_OUT to another folder",
        )
    for place in (str(path), os.path.relpath(path, IMAGES)):
        if "@" not in place:
            return place
    raise ForgeError(
        f"buildx cannot be told of {path}: it takes what follows the first @ for a digest",
        expected="an out folder without an @ in its path, or one in the checkout",
        mend="set TPUFORGE_OUT to another folder",
    )


def read_finished(target: Target) -> dict[str, Any] | None:
    """The record of the finished image; one that is not whole counts as missing.

    Args:
        target: The image.
    """
    return read_record(target.finished / "image.json", SCHEMA, _FORM)


def _refresh(
    target: Target, record: dict[str, Any], engine: Mapping[str, Any], source: Revision
) -> None:
    """Renew what may change while the image does not.

    Another engine may have baked it; and what was baked from files with changes may be what a
    commit holds by now.
    """
    here: dict[str, Any] = local_lines(engine, target)
    if source.exact and not Revision(**record["source"]).exact:
        here["source"] = asdict(source)
    if all(record.get(name) == line for name, line in here.items()):
        return
    record |= here
    path = target.finished / "image.json"
    before = path.stat()
    write_json(path, record)
    # its time is that of the bake
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _stale(target: Target, record: Mapping[str, Any] | None, key: str, inputs: Inputs) -> str:
    """Why an image has to be baked; empty if the finished one is what is wanted."""
    if record is None:
        return "there is none yet"
    return _changed(record, inputs) if record["key"] != key else damage(target, record)


def damage(target: Target, record: Mapping[str, Any]) -> str:
    """What is wrong with the layout of a finished image, as far as a moment's look tells.

    Args:
        target: The image.
        record: What :func:`read_finished` gave.

    Returns:
        Empty if nothing is. A byte that changed without a change of its file's time is found by
        whoever reads the layers: ``verify``, ``push``, a new ``sbom``.
    """
    folder = target.finished / "oci"
    try:
        image = oci.read_image(folder)
    except ForgeError as error:
        return error.found
    if image.manifest.digest != record["manifest_digest"]:
        return "the layout holds another image"
    # the record is written last, and keeps its time when it is renewed
    return oci.damaged_since(folder, image, (target.finished / "image.json").stat().st_mtime_ns)


def _changed(record: Mapping[str, Any], inputs: Inputs) -> str:
    """Which inputs are others than those of the finished image."""
    before = record["inputs"]
    changed = [name for name, value in inputs.parts.items() if before.get(name) != value]
    return f"{', '.join(changed or ['the base'])} changed"


def _docker(
    engine: Mapping[str, Any],
    *words: str | Path,
    timeout: float,
    check: bool = True,
    doing: str = "",
    mend: str = "",
    stdin: int | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Completed:
    return run(
        [engine["docker"], *words],
        timeout=timeout,
        env=clean_env(**engine["env"], **(variables or {})),
        check=check,
        doing=doing,
        mend=mend,
        stdin=stdin,
        cwd=cwd,
        log=log,
        on_line=on_line,
    )


class Readings:
    """The blobs of a layout, each read once, as soon as it is there: the engine works on meanwhile.

    Args:
        layout: The layout that BuildKit writes. A blob comes into it by rename, whole.
        known: What is in some layers; of these the digest alone is checked.
    """

    def __init__(self, layout: Path, known: Mapping[str, oci.Content]) -> None:
        self._layout, self._known = layout, known
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._asked: dict[str, Future[tuple[bool, oci.Content | None]]] = {}
        self._ended = threading.Event()
        # a Ctrl-C may come before anybody is there to end it
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._pool.shutdown(cancel_futures=True)

    def _stop(self) -> None:
        self._ended.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            for digest in oci.digests(self._layout):
                self._ask(digest)

    def _ask(self, digest: str) -> Future[tuple[bool, oci.Content | None]]:
        if digest not in self._asked:
            inside = digest not in self._known
            self._asked[digest] = self._pool.submit(
                oci.examine, self._layout, digest, inside=inside
            )
        return self._asked[digest]

    def of(self, layers: Sequence[oci.Blob]) -> dict[str, tuple[bool, oci.Content | None]]:
        """What some layers are, when all are written.

        Args:
            layers: The layers of the image.

        Returns:
            By digest: whether it is there and whole, and what is in it, if that can be read.
        """
        self._stop()
        there = set(oci.digests(self._layout))
        # the largest first, so that none is left for the end
        for layer in sorted(layers, key=lambda layer: -layer.size):
            if layer.digest in there:
                self._ask(layer.digest)
        found = {
            layer.digest: self._asked[layer.digest].result()
            if layer.digest in there
            else (False, None)
            for layer in layers
        }
        return {
            digest: (whole, self._known.get(digest, inside))
            for digest, (whole, inside) in found.items()
        }


def _build(job: Job, *, no_cache: bool) -> tuple[oci.Image, list[oci.Content]]:
    """Let BuildKit write the layout; blobs that it left damaged are written again, once.

    Returns:
        The image, and what is in each of its layers.
    """
    layout, progress = job.layout, job.progress
    if not no_cache:
        _seed(job)
    for attempt in (1, 2):
        with _alone(job) as lock, Readings(layout, _known()) as readings:
            (layout / "index.json").unlink(missing_ok=True)
            shutil.rmtree(layout / "ingest", ignore_errors=True)
            _run_bake(job, lock, _outputs(job), no_cache=no_cache and attempt == 1)
            # checks the manifest and the config, which it reads
            image = oci.read_image(layout)
            with progress.step("verifying the image's digests, and reading its layers"):
                found = readings.of(image.layers)
        bad = [layer for layer in image.layers if not found[layer.digest][0]]
        if not bad:
            return image, _contents(job, image, found)
        # the export writes missing blobs only, and trusts a file of the right name
        for blob in bad:
            blob.path(layout).unlink(missing_ok=True)
        progress.note(f"{len(bad)} damaged blobs in {layout}: writing them again", loud=True)
    raise ForgeError(
        f"the image in {layout} has damaged blobs: {', '.join(blob.digest for blob in bad)}",
        expected="every blob of the digest that names it",
        mend="check the disk, then: ./forge bake --no-cache",
        exit_code=Exit.FAULT,
    )


def _seed(job: Job) -> None:
    """Link what sibling images have into the layout: the export writes only what is missing.

    Each blob is checked by digest afterwards, wherever it came from.
    """
    for folder, layers in _siblings():
        oci.seed(folder / "oci", job.layout, [layer["digest"] for layer in layers])


def _siblings() -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Every finished image: its folder, and what its record tells of its layers."""
    for path in sorted((out_dir() / "images").glob("*/image.json")):
        record = read_record(path, SCHEMA, _FORM)
        if record is not None:
            yield path.parent, record["layers"]


@contextlib.contextmanager
def _alone(job: Job) -> Iterator[int]:
    """Wait until no client writes the layout, not even one whose bake was killed.

    The client inherits the lock as its standard input, so it holds it for as long as it lives.
    """
    with (job.target.work / "client.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            job.progress.note("waiting for the client of a bake that was killed")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _outputs(job: Job) -> list[str]:
    """What BuildKit writes: the layout, and the engine's own copy where it keeps one."""
    outputs = [_fields("type=oci", "tar=false", f"dest={job.layout}", *_COMPRESSION)]
    if job.load and _shares_store(job.engine):
        # both exports share the compressed layers, and the engine unpacks while the layout is
        # written; "docker load" afterwards takes half as long again as the whole export
        image = ("type=image", f"name={job.target.name}", "oci-mediatypes=true", "unpack=true")
        outputs.append(_fields(*image, *_COMPRESSION))
    return outputs


def _described(job: Job) -> dict[str, str]:
    """What the image says of itself: as labels, and as annotations of its manifest.

    Nothing in it comes from the checkout or the day, so equal inputs give equal images. The commit
    of the checkout is in the provenance, which is attached and no part of the image.
    """
    target = job.target
    base = {
        "org.opencontainers.image.base.name": job.base.name,
        "org.opencontainers.image.base.digest": job.base.digest,
    }
    return {
        "org.opencontainers.image.version": target.name.rpartition(":")[2],
        "org.opencontainers.image.created": datetime.fromtimestamp(job.pins.epoch, UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        ),
        # what stands on nothing has no base
        **(base if target.image != simulation.NAME else {}),
        **recipe(target).labels(target, job.inputs, job.pins),
    }


def _run_bake(job: Job, lock: int, outputs: Sequence[str], *, no_cache: bool) -> None:
    target, engine = job.target, job.engine
    settings = target.work / "bake.json"
    described = _described(job)
    annotations = [f"{name}={value}" for name, value in described.items()]
    own: dict[str, Any] = {"output": outputs, "labels": described, "annotations": annotations}
    if MORE in job.inputs.groups:
        # as the children of the tree, for another image with the lock of one
        own["args"] = {"STACK": "child"}
        own["contexts"] = {"wheels-more": str(target.work / "wheels" / MORE)}
    write_json(settings, {"target": {target.image: own}})
    words = ["buildx", "bake", "--builder", engine["builder"], "--progress", "plain"]
    words += ["--file", str(IMAGES / "docker-bake.hcl"), "--file", str(settings)]
    words += ["--no-cache"] if no_cache else []
    log = target.work / "bake.log"
    variables = {
        "PYTHON": target.python,
        "FLAVOUR": target.flavour,
        "SOURCE_DATE_EPOCH": str(job.pins.epoch),
        "BASE": job.base.context,
        "WORK": str(target.work),
        # newer versions of buildx ask before they read outside the current folder
        "BUILDX_BAKE_ENTITLEMENTS_FS": "0",
    }
    with job.progress.step("baking"):
        done = _docker(
            engine,
            *words,
            target.image,
            timeout=_BAKE_S,
            check=False,
            doing=f"baking {target.name}",
            stdin=lock,
            cwd=IMAGES,
            log=log,
            on_line=lambda line: _show(line, job.progress),
            variables=variables,
        )
    if done.code != 0:
        raise explain(done, target, log)


def _fields(*fields: str) -> str:
    """An output as buildx reads it: a record of CSV, since a folder's name may hold a comma."""
    line = io.StringIO()
    # only what may end a line is quoted for holding a line break
    csv.writer(line, lineterminator="\r\n").writerow(fields)
    return line.getvalue().removesuffix("\r\n")


def _shares_store(engine: Mapping[str, Any]) -> bool:
    """Whether the builder exports straight into the engine's image store."""
    return bool(engine["driver"] == "docker" and engine["store"] == "containerd")


def _show(line: str, progress: Progress) -> None:
    found = _STAGE.match(line)
    if found is not None:
        progress.detail(found["stage"])
        return
    found = _EXPORT.match(line)
    if found is not None:
        progress.detail(found["what"])


def explain(done: Completed, target: Target, log: Path) -> ForgeError:
    """Turn a failed bake into an error that says what mends it.

    Args:
        done: The ended client.
        target: The image.
        log: Where the whole output stands.
    """
    text = done.output
    low = text.lower()
    kept = f"the image of before, if any, is as it was; the whole log: {log}"

    def lines(*marks: str) -> str:
        found = [line for line in text.splitlines() if any(m in line.lower() for m in marks)]
        return "\n".join(found[-4:])

    if "no space left on device" in low:
        free = shutil.disk_usage(target.work).free
        where = f"{target.work} has {size(free)} free"
        return ForgeError(
            f"a disk is full: {where}; {kept}\n{lines('no space left on device')}",
            expected="1 GB free for the out folder, and 8 GB for the engine's data",
            mend="free some space (docker builder prune -f for the engine's cache), then run the "
            "same command again",
        )
    # what a step says, and not the command of one that could say it
    spoiled = re.search(r"^#\d+ [\d.]+ (.*other bytes than the lock names)$", text, re.MULTILINE)
    if spoiled is not None:
        context.touch_wheels(target)
        return ForgeError(
            f"the engine got other bytes than those that were verified: {spoiled[1]}",
            expected="the wheels that the lock names",
            mend="run the same command again: every wheel will be sent anew",
            exit_code=Exit.FAULT,
        )
    marks: tuple[str, ...] = ("error: failed to download", "error: failed to install", "  cause:")
    if refused := lines(*marks, "cannot be compiled:", "writes over what is there:"):
        return ForgeError(
            f"a wheel of {target.name} cannot go into an image:\n{refused}",
            expected="wheels that install beside each other",
            mend="lock another version of that package, or leave it out",
            exit_code=Exit.FAULT,
        )
    broken = [
        line
        for line in text.splitlines()
        if re.search(r"which is not installed|, but you have", line)
    ]
    if broken:
        return ForgeError(
            "pip check finds the environment broken:\n" + "\n".join(dict.fromkeys(broken)),
            expected="a lock that is complete",
            mend="./forge lock"
            if target.wheel is None
            else "give a wheel that the other packages accept, or take them out of the lock",
            exit_code=Exit.FAULT,
        )
    if "oci exporter is not supported" in low or "exporter is not supported" in low:
        return ForgeError(
            "this engine's image store cannot export OCI layouts",
            expected="the containerd image store, or a builder of the docker-container kind",
            mend="./forge engine",
        )
    marks = (
        "cannot connect to the docker daemon",
        "connection refused",
        "error reading from server",
    )
    marks += ("transport is closing", "code = unavailable", "unexpected eof", "broken pipe")
    if any(mark in low for mark in marks):
        return ForgeError(
            f"the engine went away while it was baking; {kept}\n{lines(*marks)}",
            expected="a Docker daemon that answers until the end",
            mend="start it again (./forge engine), then run the same command again",
        )
    if (
        "unexpected commit digest" in low
        or "failed size validation" in low
        or "digest mismatch" in low
    ):
        return ForgeError(
            f"a layer of the base is not what its digest says\n{lines('digest', 'validation')}",
            expected="the base as it was made",
            mend="rm -r out/base, then run the same command again",
            exit_code=Exit.FAULT,
        )
    return ForgeError(
        f"the bake of {target.name} failed with exit code {done.code}; {kept}\n{done.tail}",
        expected="exit code 0",
        mend=f"read {log}",
    )


def _known() -> dict[str, oci.Content]:
    """What finished images tell of their layers, which need not be read again."""
    return {
        layer["digest"]: oci.Content(layer["unpacked_bytes"], layer["what"])
        for _, layers in _siblings()
        for layer in layers
        # an empty one costs nothing to read, and says better what it is
        if layer["unpacked_bytes"]
    }


def _contents(
    job: Job, image: oci.Image, found: Mapping[str, tuple[bool, oci.Content | None]]
) -> list[oci.Content]:
    """What is in each layer, once all are checked."""
    contents = [
        # one that could not be read says why when it is read again
        found[layer.digest][1] or oci.content(job.layout, layer)
        for layer in image.layers
    ]
    # a file of the bake's own time would give another digest in the next engine
    late = [c.newest for c in contents if c.newest[0] > job.pins.epoch]
    if late and job.base.context.startswith("oci-layout:"):
        raise ForgeError(
            f"{late[0][1]} in the image has the time {late[0][0]:.0f}",
            expected=f"nothing later than {job.pins.epoch}, the epoch in lock/pins.toml",
            mend="set its time in the stage of images/Dockerfile that makes it",
            exit_code=Exit.FAULT,
        )
    return contents


def _record(job: Job, image: oci.Image, contents: Sequence[oci.Content]) -> dict[str, Any]:
    target, inputs, base = job.target, job.inputs, job.base
    return {
        "schema": SCHEMA,
        "image": target.image,
        "python": target.python,
        "flavour": target.flavour,
        "name": target.name,
        "manifest_digest": image.manifest.digest,
        "config_digest": image.config.digest,
        "compressed_bytes": image.compressed,
        "unpacked_bytes": sum(content.unpacked for content in contents),
        "layers": [
            {
                "digest": layer.digest,
                "compressed_bytes": layer.size,
                "unpacked_bytes": content.unpacked,
                "what": content.what,
            }
            for layer, content in zip(image.layers, contents, strict=True)
        ],
        "labels": image.labels,
        "key": inputs.key(base.digest),
        "inputs": inputs.parts,
        "base_digest": base.digest,
        "lock_sha256": inputs.lock_sha256,
        "suite_sha256": inputs.suite_sha256,
        "notes": [*base.notes, *_wheel_notes(target, job.pins)],
        "overlay": _overlay(target, inputs),
        "source": asdict(job.source),
        "gzip": None,
        "run_line": recipe(target).run_line(target.name),
        **local_lines(job.engine, target),
        "engine": {"versions": job.engine["versions"], "driver": job.engine["driver"]},
    }


def _wheel_notes(target: Target, pins: Pins) -> list[str]:
    """What the report must say of a given wheel."""
    wheel = target.wheel
    if wheel is None:
        return []
    notes = [
        f"torch_tpu {wheel.version} is a wheel that was given to the bake ({wheel.file}, "
        f"sha256:{wheel.sha256}), in the place of the locked {pins.torch_tpu.version}"
    ]
    return [*notes, f"of the given wheel {wheel.file}: {wheel.audit}"] if wheel.audit else notes


def _overlay(target: Target, inputs: Inputs) -> dict[str, str] | None:
    """The given wheel for machines, and where the lock is that holds it."""
    wheel = target.wheel
    if wheel is None:
        return None
    return {
        "package": overlay.NAME,
        "version": wheel.version,
        "file": wheel.file,
        "sha256": wheel.sha256,
        "audit": wheel.audit or "no error",
        "lock": (target.finished / "lock.txt").relative_to(out_dir()).as_posix(),
        "lock_sha256": inputs.lock_sha256,
        "on": target.lock.name,
    }


def local_lines(engine: Mapping[str, Any], target: Target) -> dict[str, str]:
    """The lines that reach an image in a private engine, which the user's own docker cannot see.

    Args:
        engine: The record of the engine.
        target: The image.

    Returns:
        ``local_run_line`` and ``save_line``; both empty if the engine is the user's own.
    """
    if not engine["private"]:
        return {"local_run_line": "", "save_line": ""}
    docker = ["docker", "-H", str(engine["docker_host"])]
    looks = {
        builder.NAME: ["git", "--version"],
        bare.NAME: ["python3", "--version"],
    }
    look = looks.get(target.image, ["versions"])
    if target.image == simulation.NAME:
        line = f"{shlex.join([*docker, 'create', '--name', 'simulator', target.name, 'none'])}"
    else:
        line = shlex.join([*docker, "run", "--rm", target.name, *look])
    return {
        "local_run_line": line,
        "save_line": f"{shlex.join([*docker, 'save', target.name])} | docker load",
    }


def _in_engine(engine: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether the engine has this very image under its tag.

    The containerd store names an image by its manifest, the classic one by its config.
    """
    asked = ["image", "inspect", "--format", "{{.Id}}", record["name"]]
    doing = f"looking for {record['name']} in the engine"
    done = _docker(engine, *asked, timeout=_ASK_S, check=False, doing=doing, mend="docker version")
    wanted = {record["manifest_digest"], record["config_digest"]}
    return done.code == 0 and bool(wanted & set(done.output.split()))


def _load(engine: Mapping[str, Any], target: Target, folder: Path, progress: Progress) -> None:
    """Put the image of a layout into the engine's store."""
    image = oci.read_image(folder)
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            try:
                oci.write_archive(folder, image, target.name, file)
            except BrokenPipeError:
                # the client has ended, and says why
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with progress.step("loading the image into the engine"):
            _docker(engine, "load", timeout=_LOAD_S, stdin=reading, doing=f"loading {target.name}")
    finally:
        os.close(reading)
        writer.join()
    record = {
        "name": target.name,
        "manifest_digest": image.manifest.digest,
        "config_digest": image.config.digest,
    }
    if not _in_engine(engine, record):
        raise ForgeError(
            f"the engine has another image under {target.name} than the one it was given",
            expected=image.manifest.digest,
            mend=f"docker rmi {target.name}, then ./forge bake",
            exit_code=Exit.FAULT,
        )


def _outcome(record: Mapping[str, Any], *, loaded: bool | None = None) -> Outcome:
    unchanged = loaded is True
    digest = record["manifest_digest"]
    sizes = (
        f"{size(record['compressed_bytes'])} compressed, {size(record['unpacked_bytes'])} unpacked"
    )
    if unchanged:
        summary = f"{record['name']} ({digest[:19]}…) is there, and no input of it has changed"
    elif loaded is False:
        summary = (
            f"{record['name']} ({digest[:19]}…) was there, and is loaded into the engine again"
        )
    else:
        summary = f"{record['name']}, {digest}, {sizes}"
    lines = [f"  image     {record['name']}", f"  digest    {digest}", f"  size      {sizes}"]
    given = record.get("overlay")
    if isinstance(given, dict):
        lines.append(f"  torch_tpu {given.get('file')}, given; not the locked one")
    where = "on a TPU" if record.get("flavour") else "to use"
    lines.append(f"  {where:<8}  {record['run_line']}")
    if record.get("flavour"):
        there = (
            "once the image is there: ./forge push --to HOST/NAME, or docker save and docker load"
        )
        narrow = f"pushed, with no more rights than it needs: tpu-run HOST/NAME@{digest} python"
        lines += [f"{'':<12}{there}", f"{'':<12}{narrow} (docs/tpu-vm.md)"]
    if record["local_run_line"]:
        lines.append(f"  here      {record['local_run_line']}")
        lines.append(f"  to yours  {record['save_line']}")
    return Outcome(
        "unchanged" if unchanged else "done",
        summary,
        data=dict(record),
        notes=list(record["notes"]),
        text="\n".join(lines),
    )


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    if options.unaudited and not options.wheel:
        raise ForgeError(
            "--unaudited says nothing without --wheel",
            expected="--wheel PATH --unaudited: the locked wheels are judged when they are fetched",
            mend="leave it out",
        )
    if options.all:
        return _bake_all(options, pins, progress)
    # the names first: a wheel takes a while to read
    choose(options, pins)
    wheel = None
    if options.wheel:
        wheel = read_wheel(Path(options.wheel), progress, unaudited=options.unaudited)
    target = choose(options, pins, wheel)
    outcome = bake(
        target,
        pins,
        progress,
        no_cache=options.no_cache,
        release=options.release,
        base=options.base,
        load=not options.no_load,
        fallback=options.gzip,
    )
    if outcome.status == "done" and not options.json:
        _print_layers(outcome.data)
    return outcome


def _bake_all(options: argparse.Namespace, pins: Pins, progress: Progress) -> Outcome:
    """Bake whatever can be had here, one after the other; the rest says why not.

    The table has one line for each; what was found in full, and what mends it, is printed as it
    comes and stays in the row.
    """
    given = [name for name in ("image", "flavour", "wheel", "base") if getattr(options, name)]
    if given:
        raise ForgeError(
            f"--all takes no --{given[0]}",
            expected="--all, alone or with --python",
            mend="leave one of them out",
        )
    wanted = [one for one in members(pins) if options.python in (None, one.python)]
    ensure_engine(progress)
    rows: list[dict[str, Any]] = []
    worst = Exit.OK
    for number, member in enumerate(wanted, 1):
        progress.note(f"{member.slug}, {number} of {len(wanted)}")
        row: dict[str, Any] = {
            "image": member.image.name,
            "python": member.python,
            "why": "",
            "error": None,
        }
        whole = ""
        try:
            target = member_target(member, pins)
            row |= {"name": target.name, "why": lacks(target, pins)}
            if not row["why"]:
                outcome = bake(
                    target,
                    pins,
                    progress,
                    no_cache=options.no_cache,
                    release=options.release,
                    load=not options.no_load,
                    fallback=options.gzip,
                )
                row |= {"manifest_digest": outcome.data["manifest_digest"]}
                row |= {"status": "baked" if outcome.status == "done" else "unchanged"}
        except ForgeError as error:
            said = {"expected": error.expected, "mend": error.mend}
            whole = "\n".join(
                [error.found, *(f"  {name}: {text}" for name, text in said.items() if text)]
            )
            row |= {"why": error.found.splitlines()[0], "error": error.as_dict()}
            if error.exit_code == Exit.FAULT:
                worst = Exit.FAULT
                row |= {"status": "refused", "why": f"{row['why']}; {error.mend}"}
        row.setdefault("status", "cannot be had")
        if row["why"]:
            progress.note(f"{member.slug}: {whole or row['why']}", loud=True)
        rows.append(row)
    gone = [row for row in rows if row["why"]]
    if gone and options.release:
        worst = worst or Exit.CANNOT
    if not options.json:
        table = [
            (row["image"], row["python"], row["status"], row["why"] or row["manifest_digest"][:19])
            for row in rows
        ]
        print_table(("image", "Python", "", "digest, or why not"), table)
    made = sum(row["status"] == "baked" for row in rows)
    return Outcome(
        "done" if made or gone else "unchanged",
        f"{len(rows) - len(gone)} of {len(rows)} images are there, {made} of them new",
        data={"images": rows},
        notes=[f"{row['image']} {row['python']}: {row['why']}" for row in gone],
        exit_code=worst,
    )


def _print_layers(data: Mapping[str, Any]) -> None:
    rows = [
        (layer["what"], size(layer["compressed_bytes"]), size(layer["unpacked_bytes"]))
        for layer in data["layers"]
    ]
    print_table(("layer", "compressed", "unpacked"), rows)


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Bake an image from the base and the wheelhouse, with no network.")
    add_image(made, "the lock to bake from")
    made.add_argument(
        "--all", action="store_true", help="every image of the set that can be had here"
    )
    made.add_argument(
        "--gzip",
        action="store_true",
        help="have it with layers in gzip too, for pullers from before zstd",
    )
    made.add_argument("--no-cache", action="store_true", help="take nothing from the build cache")
    made.add_argument(
        "--no-load",
        action="store_true",
        help="write the layout only, and leave the engine as it is",
    )
    made.add_argument(
        "--release", action="store_true", help="refuse a base that is not exactly the locked one"
    )
    made.add_argument(
        "--wheel",
        metavar="PATH",
        help="a torch_tpu wheel, such as build_wheel made, in the place of the locked one",
    )
    made.add_argument(
        "--unaudited",
        action="store_true",
        help="take the wheel although its audit found errors",
    )
    made.add_argument(
        "--base", metavar="docker-image://NAME@sha256:…", help="another base than the Debian one"
    )
    return made


def _subject(options: argparse.Namespace) -> str:
    pins = load()
    if options.all:
        return "all"
    if options.image in ONE_FOR_ALL:
        return str(options.image)
    python = (options.python or pins.default_python).replace(".", "")
    return f"{options.image or pins.default_image}-py{python}"


main = main_of(VERB, arguments, _act, subject=_subject)


if __name__ == "__main__":
    raise SystemExit(main())

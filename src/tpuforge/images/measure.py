"""``measure``: what a bake costs, beside the plain Dockerfile of the same set, in one run.

Both ways use one engine of their own that begins with an empty cache, one base and the same
versions: cold and warm bakes, a bake after a new torch_tpu, sizes, what is pulled again after that,
pull and unpack times from a registry on the loopback, and whether rebuilds agree.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.version import Version

from tpuforge import layout as oci
from tpuforge.console import Progress, duration, print_table, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.host import remove_tree
from tpuforge.images.choice import choose
from tpuforge.images.context import Target, base_set
from tpuforge.images.loopback import Loopback, loopback
from tpuforge.images.plain import NAME as PLAIN
from tpuforge.images.plain import Plain
from tpuforge.images.reproduce import FEWEST, fill, reproduce
from tpuforge.lockfile import Locked, read_lock
from tpuforge.paths import ROOT, exclusive, out_dir, write_json
from tpuforge.pins import load
from tpuforge.process import clean_env, redact, run
from tpuforge.registry import Reference, Registry
from tpuforge.verb import Outcome, add_image, parser, run_verb

VERB = "measure"
SCHEMA = "tpuforge.measure/1"
TORCH_TPU = "torch-tpu"
_BAKE_S = 3600.0
_PULL_S = 900.0
_WARM = 3
_PULLS = 3
_TIMES = 3
# what a zip keeps of a time, so that the same bytes come out each time
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass
class Figure:
    """What one side came to.

    Attributes:
        samples: What was measured, in the order of the runs.
        not_run: Why there is none; empty if there is.
    """

    samples: list[float] = field(default_factory=list)
    not_run: str = ""

    @property
    def median(self) -> float | None:
        """The middle of the samples."""
        return statistics.median(self.samples) if self.samples else None

    def as_dict(self) -> dict[str, Any]:
        """It for machines."""
        return {"samples": self.samples, "median": self.median, "not_run": self.not_run or None}


@dataclass
class Row:
    """One figure of both sides.

    Attributes:
        id: Its name for machines.
        what: What it is.
        unit: ``s``, ``B`` or ``share``.
        ours: Of tpuforge.
        plain: Of the plain way.
    """

    id: str
    what: str
    unit: str
    ours: Figure = field(default_factory=Figure)
    plain: Figure = field(default_factory=Figure)


def rows() -> dict[str, Row]:
    """Everything that is measured, with nothing measured yet."""
    made = [
        Row("bake.cold", "cold bake, until the engine has the image", "s"),
        Row("bake.warm", "warm bake, nothing changed", "s"),
        Row("bake.warm.forge", "the same through ./forge, with everything around it", "s"),
        Row("bake.bump", "bake after a new torch_tpu", "s"),
        Row("cpu.cold", "processor time of the cold bake, with the engine's", "s"),
        Row("cpu.bump", "processor time of the bake after that", "s"),
        Row("size.compressed", "compressed", "B"),
        Row("size.gzip", "compressed with gzip, for old pullers", "B"),
        Row("size.unpacked", "unpacked", "B"),
        Row("size.largest", "the largest layer, compressed", "B"),
        Row("push.full", "push into an empty registry", "s"),
        Row("push.bump", "push after that new torch_tpu", "s"),
        Row("pull.full", "pull and unpack into an empty engine", "s"),
        Row("pull.bump", "pull and unpack after that new torch_tpu", "s"),
        Row("pulled.full", "bytes pulled into an empty engine", "B"),
        Row("pulled.bump", "bytes pulled after that new torch_tpu", "B"),
        Row("equal", "rebuilds with the digest of the first", "share"),
    ]
    return {row.id: row for row in made}


@dataclass
class Bench:
    """What the measurements share.

    Attributes:
        target: The image.
        out: The out folder of the measurement.
        engine: The record of its engine.
        progress: Told what happens.
        rows: The figures.
        notes: What a reader of the figures must not miss.
    """

    target: Target
    out: Path
    engine: Mapping[str, Any]
    progress: Progress
    rows: dict[str, Row]
    notes: list[str]

    def verb(self, doing: str, module: str, *words: str) -> float:
        """Run a verb of this project in the out folder of the measurement; its seconds."""
        return self.call(doing, [sys.executable, "-m", module, *words])

    def call(self, doing: str, words: Sequence[str | Path]) -> float:
        """Run a program of this project in the out folder of the measurement; its seconds."""
        variables = {**self.engine["env"], "PYTHONPATH": str(ROOT / "src")}
        with self.progress.step(doing):
            started = time.monotonic()
            run(
                words,
                timeout=_BAKE_S,
                env=clean_env(**variables, TPUFORGE_OUT=str(self.out)),
                cwd=ROOT,
                on_line=self.progress.detail,
                doing=doing,
            )
            return time.monotonic() - started

    @contextmanager
    def processor(self, figure: Figure) -> Iterator[None]:
        """Note the processor time of what is done meanwhile, here and in the engine.

        Unlike seconds on the wall it holds, within some percent, on a machine with other work.
        """
        before = processor_time(self.engine["pid"])
        yield
        figure.samples.append(processor_time(self.engine["pid"]) - before)

    def docker(self, *words: str) -> float:
        """Run a command of Docker; its seconds."""
        started = time.monotonic()
        run(
            [self.engine["docker"], *words],
            timeout=_PULL_S,
            env=clean_env(**self.engine["env"]),
            doing=f"docker {' '.join(words[:2])}",
        )
        return time.monotonic() - started

    def empty(self) -> None:
        """Leave nothing in the engine: no image, no build cache. It is the measurement's own."""
        self.docker("system", "prune", "--all", "--force")
        self.docker("buildx", "prune", "--builder", self.engine["builder"], "--all", "--force")

    def keep(self, layout: Path, name: str) -> Path:
        """Keep an image while others take its place."""
        kept = self.out / "kept" / name
        oci.publish(layout, kept, oci.read_image(layout), f"{name}:latest")
        return kept


def processor_time(engine: int) -> float:
    """The processor time, user and system, of an engine and of the children that ended here.

    Args:
        engine: The process of the engine; what it started counts too, ended or not.

    Returns:
        Seconds, of use as a difference alone.
    """
    ticks: dict[int, int] = {}
    below: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # one that has ended since is in the time of its parent
        with suppress(OSError):
            # the name, in brackets, may hold anything: from the parent on, see proc_pid_stat(5)
            fields = path.read_bytes().rpartition(b")")[2].split()
            pid = int(path.parent.name)
            below.setdefault(int(fields[1]), []).append(pid)
            ticks[pid] = sum(map(int, fields[11:15]))
    found, total = [engine], 0
    while found:
        pid = found.pop()
        total += ticks.get(pid, 0)
        found += below.get(pid, [])
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return total / os.sysconf("SC_CLK_TCK") + ended.ru_utime + ended.ru_stime


@contextmanager
def own_engine(out: Path, progress: Progress) -> Iterator[dict[str, Any]]:
    """Have an engine with nothing in it.

    Args:
        out: The out folder that it lives in.
        progress: Told what happens.

    Yields:
        Its record, as in ``out/engine/engine.json``.

    Raises:
        ForgeError: If none can be set up.
    """
    env = clean_env(TPUFORGE_OUT=str(out), PYTHONPATH=str(ROOT / "src"))
    words = [sys.executable, "-m", "tpuforge.images.engine"]
    with progress.step("starting an engine of its own"):
        done = run([*words, "--private", "--json"], timeout=1800, env=env, check=False)
        try:
            if done.code != 0:
                raise ForgeError(
                    f"there is no engine of its own to measure in\n{done.tail}",
                    expected="root on Debian or Ubuntu: cold is cold in an engine of its own alone",
                    mend="sudo ./forge measure",
                )
            record = json.loads((out / "engine" / "engine.json").read_text(encoding="utf-8"))
        except BaseException:
            run([*words, "--stop"], timeout=300, env=env, check=False)
            raise
    try:
        yield record
    finally:
        run([*words, "--stop"], timeout=300, env=env, check=False)


def bumped(wheel: Path, folder: Path) -> Path:
    """Make the next version of a wheel: the same files, with the version in its metadata alone new.

    Args:
        wheel: The wheel.
        folder: Where the new one goes.

    Returns:
        The new one.
    """
    name, version, *tags = wheel.name.removesuffix(".whl").split("-")
    old = Version(version)
    new = f"{old.major}.{old.minor}.{old.micro + 1}"
    target = folder / f"{'-'.join((name, new, *tags))}.whl"
    before, after = f"{name}-{version}.dist-info/", f"{name}-{new}.dist-info/"
    folder.mkdir(parents=True, exist_ok=True)
    record: list[str] = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as made:
        for entry in source.infolist():
            path = entry.filename.replace(before, after, 1)
            if path == f"{after}RECORD":
                continue
            data = source.read(entry)
            if path == f"{after}METADATA":
                data = re.sub(rb"(?m)^Version: .*$", f"Version: {new}".encode(), data, count=1)
            info = zipfile.ZipInfo(path, _ZIP_TIME)
            info.external_attr = entry.external_attr
            made.writestr(info, data, zipfile.ZIP_DEFLATED, 1)
            if not entry.is_dir():
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
                record.append(f"{path},sha256={digest.rstrip('=')},{len(data)}\n")
        record.append(f"{after}RECORD,,\n")
        made.writestr(zipfile.ZipInfo(f"{after}RECORD", _ZIP_TIME), "".join(record))
    return target


def pulled_again(before: oci.Image, after: oci.Image) -> int:
    """Bytes that a machine with one image pulls for another.

    Args:
        before: The image that it has.
        after: The one that it pulls.
    """
    known = {blob.digest for blob in before.blobs}
    return sum(blob.size for blob in after.blobs if blob.digest not in known)


def _wheel(package: Locked) -> Path:
    found = list((out_dir() / "wheelhouse" / package.sha256).glob("*.whl"))
    if len(found) != 1:
        raise ForgeError(
            f"the wheel of {package.name} {package.version} is not in the wheelhouse",
            expected="every wheel of the lock",
            mend="./forge fetch_wheel",
        )
    return found[0]


def _sizes(bench: Bench, side: Callable[[Row], Figure], layout: Path) -> None:
    image = oci.read_image(layout)
    unpacked = sum(oci.content(layout, layer).unpacked for layer in image.layers)
    side(bench.rows["size.compressed"]).samples.append(image.compressed)
    side(bench.rows["size.unpacked"]).samples.append(unpacked)
    largest = max(layer.size for layer in image.layers)
    side(bench.rows["size.largest"]).samples.append(largest)


def ours(bench: Bench, wheel: Path, times: int) -> tuple[Path, Path]:
    """Measure the bakes of this project.

    Args:
        bench: What the measurements share.
        wheel: The next torch_tpu.
        times: How many rebuilds are compared with the first bake.

    Returns:
        The layouts of the image and of the one with the next torch_tpu.
    """
    target, progress = bench.target, bench.progress
    words = ["--image", target.image, "--python", target.python, "--flavour", target.flavour]
    layout = bench.out / "images" / target.slug / "oci"
    bake = "tpuforge.images.bake"
    with bench.processor(bench.rows["cpu.cold"].ours):
        cold = bench.verb("tpuforge: cold", bake, *words)
    bench.rows["bake.cold"].ours.samples.append(cold)
    for _ in range(_WARM):
        warm = bench.verb("tpuforge: warm", bake, *words)
        bench.rows["bake.warm"].ours.samples.append(warm)
        around = bench.call(
            "tpuforge: warm, through ./forge", [sys.executable, ROOT / "forge", "bake", *words]
        )
        bench.rows["bake.warm.forge"].ours.samples.append(around)
    _sizes(bench, lambda row: row.ours, layout)
    first = bench.keep(layout, "ours")
    newer = [*words, "--wheel", str(wheel)]
    with bench.processor(bench.rows["cpu.bump"].ours):
        bump = bench.verb("tpuforge: after a new torch_tpu", bake, *newer)
    bench.rows["bake.bump"].ours.samples.append(bump)
    second = bench.keep(layout, "ours-bumped")

    def fall_back() -> None:
        bench.verb("tpuforge: with gzip", bake, *words, "--no-load", "--gzip")
        record = json.loads((layout.parent / "image.json").read_text(encoding="utf-8"))
        bench.rows["size.gzip"].ours.samples.append(record["gzip"]["compressed_bytes"])

    def rebuild() -> None:
        # several times what one bake leaves would fill the disk
        bench.empty()
        found = reproduce(target, times, bench.engine, progress)
        digest = oci.read_image(first).manifest.digest
        equal = sum(one == digest for one in found["digests"])
        bench.rows["equal"].ours.samples += [equal, times]
        bench.notes += [f"a rebuild differs: {line}" for line in found["differences"]]

    # after all that is timed: they leave other blobs in the build cache
    _try(bench, lambda row: row.ours, "gzip", fall_back, ("size.gzip",))
    _try(bench, lambda row: row.ours, "rebuilds", rebuild, ("equal",))
    return first, second


def plainly(
    bench: Bench, plain: Plain, packages: Sequence[Locked], wheel: Path
) -> tuple[Path, Path]:
    """Measure the plain way.

    Args:
        bench: What the measurements share.
        plain: How it is built here.
        packages: What it installs.
        wheel: The next torch_tpu.

    Returns:
        The layouts of the image and of the one with the next torch_tpu.
    """
    # torch's own index cannot be reached everywhere; so both sides have its wheel at hand
    local = [_wheel(package) for package in packages if package.name in ("torch", "torchvision")]
    image = [f"--tag={PLAIN}:measured", "--load"]
    layouts = [bench.out / "kept" / name for name in ("plain", "plain-again", "plain-bumped")]
    export = [[f"--output=type=oci,tar=false,dest={layout}"] for layout in layouts]

    plain.ask_for(packages, local)
    with (
        bench.progress.step("the plain way: cold"),
        bench.processor(bench.rows["cpu.cold"].plain),
    ):
        bench.rows["bake.cold"].plain.samples.append(plain.build(image))
    for _ in range(_WARM):
        bench.rows["bake.warm"].plain.samples.append(plain.build(image))
    plain.build(export[0])
    _sizes(bench, lambda row: row.plain, layouts[0])
    bench.rows["size.gzip"].plain.samples += bench.rows["size.compressed"].plain.samples
    with bench.progress.step("the plain way: a rebuild"):
        plain.build(export[1], no_cache=True)
    digests = [oci.read_image(layout).manifest.digest for layout in layouts[:2]]
    bench.rows["equal"].plain.samples += [float(digests[0] == digests[1]), 1.0]
    shutil.rmtree(layouts[1])
    version = wheel.name.split("-")[1]
    newer = [Locked(one.name, version, "") if one.name == TORCH_TPU else one for one in packages]
    plain.ask_for(newer, [*local, wheel])
    with (
        bench.progress.step("the plain way: after a new torch_tpu"),
        bench.processor(bench.rows["cpu.bump"].plain),
    ):
        bench.rows["bake.bump"].plain.samples.append(plain.build(image))
    plain.build(export[2])
    return layouts[0], layouts[2]


def pulls(
    bench: Bench,
    registry: Loopback,
    side: Callable[[Row], Figure],
    name: str,
    layouts: tuple[Path, Path],
) -> None:
    """Measure pushes and pulls of one side.

    Args:
        bench: What the measurements share.
        registry: The registry.
        side: Which figure of a row is meant.
        name: The side, for the repository.
        layouts: Of the image, and of the one with the next torch_tpu.
    """
    repository = f"{registry.address}/{name}"
    images = [oci.read_image(layout) for layout in layouts]
    for row, layout, tag in zip(("push.full", "push.bump"), layouts, ("old", "new"), strict=True):
        with bench.progress.step(f"{name}: {row}"):
            side(bench.rows[row]).samples.append(
                _push(layout, f"{repository}:{tag}", bench.progress)
            )
    wanted = (images[0].compressed, pulled_again(*images))
    for _ in range(_PULLS):
        bench.empty()
        for kind, image, least in zip(("full", "bump"), images, wanted, strict=True):
            before = registry.sent()
            with bench.progress.step(f"{name}: pull.{kind}"):
                spent = bench.docker("pull", f"{repository}@{image.manifest.digest}")
            sent = registry.sent() - before
            side(bench.rows[f"pull.{kind}"]).samples.append(spent)
            side(bench.rows[f"pulled.{kind}"]).samples.append(sent)
            if sent < least:
                bench.notes.append(
                    f"{name}: {size(sent)} came for pull.{kind} instead of {size(least)}: the "
                    "engine had some of it"
                )


def machine() -> dict[str, Any]:
    """What the figures were measured on; not whose machine it is."""
    processor = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor or platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average": os.getloadavg()[0],
    }


def _push(layout: Path, reference: str, progress: Progress) -> float:
    started = time.monotonic()
    Registry(progress).copy_in(layout, Reference.parse(reference))
    return time.monotonic() - started


def _try(
    bench: Bench,
    side: Callable[[Row], Figure],
    what: str,
    do: Callable[[], Any],
    only: Collection[str] = (),
) -> Any:
    """Do a part of one side; what of it (all, or some rows only) then has no figure says why."""
    try:
        return do()
    except ForgeError as error:
        if error.exit_code == Exit.INTERRUPTED:
            raise
        first = error.found.splitlines()[0]
        bench.progress.note(f"{what}: not run: {first}", loud=True)
        bench.notes.append(f"{what}: not run: {error.found}")
        for row in bench.rows.values():
            figure = side(row)
            if not figure.samples and not figure.not_run and (not only or row.id in only):
                figure.not_run = first
        return None


def _target(options: argparse.Namespace) -> Target:
    target = choose(options, load())
    if not target.flavour:
        raise ForgeError(
            f"the image {target.image} holds no wheels, so the plain way has nothing to install",
            expected="an image of wheels, such as runtime",
            mend="./forge measure --image runtime",
        )
    return target


def measure(options: argparse.Namespace, target: Target, progress: Progress) -> dict[str, Any]:
    """Measure both ways.

    Args:
        options: The verb's.
        target: The image.
        progress: Told what happens.

    Returns:
        The document (format: docs/measure.md).

    Raises:
        ForgeError: If there is no engine, wheel or base, or a bake of tpuforge fails.
    """
    pins, started = load(), datetime.now(UTC)
    packages = read_lock(target.lock)
    torch_tpu = next(package for package in packages if package.name == TORCH_TPU)
    tools = read_lock(ROOT / "lock" / f"tools-py{target.python.replace('.', '')}.txt")
    pip = _wheel(next(package for package in tools if package.name == "pip"))
    for package in packages:
        _wheel(package)
    out = out_dir() / "measure" / "work"
    remove_tree(out)
    before = machine()
    try:
        fill(out, copies=False, base=out_dir())
        with progress.step("making the next torch_tpu"):
            wheel = bumped(_wheel(torch_tpu), out / "next")
        with own_engine(out, progress) as engine:
            bench = Bench(target, out, engine, progress, rows(), [])
            suite = base_set(target, pins).label
            # both ways stand on it, so it counts for neither
            bench.verb(f"the base {suite}", "tpuforge.images.base", "--suite", suite)
            base = json.loads((out / "base" / f"{suite}.json").read_text(encoding="utf-8"))
            _both(options, bench, pip, wheel, base)
    finally:
        remove_tree(out)
    return {
        "schema": SCHEMA,
        "date": started.isoformat(timespec="seconds"),
        "command": redact(shlex.join(["./forge", VERB, *(options.words or [])])),
        "machine": {**before, "load_average_after": os.getloadavg()[0]},
        "engine": engine["versions"],
        "image": target.name,
        "notes": bench.notes,
        "rows": [
            {
                "id": row.id,
                "what": row.what,
                "unit": row.unit,
                "tpuforge": row.ours.as_dict(),
                "plain": row.plain.as_dict(),
            }
            for row in bench.rows.values()
        ],
    }


def _both(
    options: argparse.Namespace,
    bench: Bench,
    pip: Path,
    wheel: Path,
    base: Mapping[str, Any],
) -> None:
    def side(row: Row) -> Figure:
        return row.plain

    # dockerd, which then has a network of its own, would remove another's bridge (daemon.py)
    apart = any(name == "docker0" for _, name in socket.if_nameindex())
    named = f"oci-layout://{bench.out / base['layout']}@{base['manifest_digest']}"
    plain = Plain(bench.engine, bench.out / "plain", named, options.network)
    if not options.no_plain:
        # now, and not after many minutes: a file that is named may not be there
        plain.settle(pip, options.pip_conf, options.ca)
    mine, theirs = ours(bench, wheel, options.times), None
    if options.no_plain:
        for row in bench.rows.values():
            row.plain.not_run = "left out with --no-plain"
    else:

        def build() -> tuple[Path, Path]:
            if apart and options.network == "host":
                _refuse("the engine has no network: this machine's docker0 belongs to another one")
            bench.empty()
            return plainly(bench, plain, read_lock(bench.target.lock), wheel)

        theirs = _try(bench, side, "the plain way", build)
    for which, name, layouts in (
        (lambda row: row.ours, "tpuforge", mine),
        (side, "plain", theirs),
    ):
        if layouts is None:
            continue

        def move(
            which: Callable[[Row], Figure] = which,
            name: str = name,
            layouts: tuple[Path, Path] = layouts,
        ) -> None:
            if apart:
                _refuse("the engine does not see the loopback: docker0 belongs to another one")
            with loopback(bench.out / f"registry-{name}", bench.progress) as registry:
                pulls(bench, registry, which, name, layouts)

        _try(bench, which, f"{name}: push and pull", move)


def _refuse(why: str) -> None:
    raise ForgeError(why)


def _shown(figure: Figure, unit: str) -> str:
    """A figure for people."""
    if not figure.samples:
        return "not run" if figure.not_run else ""
    if unit == "share":
        return f"{figure.samples[0]:.0f} of {figure.samples[1]:.0f}"
    middle = statistics.median(figure.samples)
    if unit == "B":
        return size(middle)
    text = duration(middle)
    if len(figure.samples) > 1:
        text += f" ({min(figure.samples):.1f} to {max(figure.samples):.1f})"
    return text


def table(document: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """The figures for people: what, tpuforge's, the plain way's, and the share of one in the other.

    Args:
        document: What was measured.
    """
    lines = []
    for row in document["rows"]:
        figures = [
            Figure(row[side]["samples"], row[side]["not_run"] or "")
            for side in ("tpuforge", "plain")
        ]
        share = ""
        if row["unit"] != "share" and figures[0].median is not None and figures[1].median:
            share = f"{figures[0].median / figures[1].median:.0%}"
        lines.append((row["what"], *(_shown(one, row["unit"]) for one in figures), share))
    return lines


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.times < FEWEST:
        raise ForgeError(
            f"--times {options.times} leaves nothing to compare",
            expected=f"--times {FEWEST} or more",
            mend=f"./forge measure --times {_TIMES}",
        )
    target = _target(options)
    with exclusive(VERB, lambda who: progress.note(f"waiting for {who}, which measures")):
        document = measure(options, target, progress)
    path = out_dir() / "measure" / "measure.json"
    write_json(path, document)
    if not options.json:
        columns = ("", "tpuforge", "plain", "share")
        print_table(columns, table(document))
    equal = next(row for row in document["rows"] if row["id"] == "equal")["tpuforge"]
    samples = equal["samples"]
    told, code = f"rebuilds could not be made: {equal['not_run']}", Exit.CANNOT
    if samples:
        told = f"{_shown(Figure(samples), 'share')} rebuilds agree"
        code = Exit.OK if samples[0] == samples[1] else Exit.FAULT
    text = f"{document['date']}, {document['machine']['cores']} cores, {document['command']}"
    return Outcome(
        "done",
        f"{target.name}: {told}; the figures: {path}",
        document,
        notes=document["notes"],
        exit_code=code,
        text=text,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        The exit code: 0 when it was measured, 1 when a rebuild of tpuforge's differs.
    """
    made = parser(VERB, "Measure bakes, sizes and pulls beside those of a plain Dockerfile.")
    add_image(made, "the lock to bake from")
    made.add_argument(
        "--times", type=int, default=_TIMES, metavar="N", help=f"rebuilds (default: {_TIMES})"
    )
    made.add_argument("--no-plain", action="store_true", help="leave the plain way out")
    made.add_argument(
        "--pip-conf", metavar="FILE", help="pip's settings in the plain build; yours if not given"
    )
    made.add_argument(
        "--ca",
        metavar="FILE",
        help="certificates in the plain build; those of your settings if not given",
    )
    made.add_argument(
        "--network",
        choices=("host", "default"),
        default="host",
        help="network of the plain build (default: host, as a private engine has no network)",
    )
    made.set_defaults(words=list(sys.argv[1:] if argv is None else argv))
    return run_verb(VERB, made, _act, argv)


if __name__ == "__main__":
    raise SystemExit(main())

"""``reproduce``: bake an image again and again from nothing and compare, bit for bit.

Each rebuild is another machine in small: another folder, other times and modes, another umask,
locale and time zone, a copy of the repository, another user. When two manifests differ, the first
differing files are named. A published image is held against a rebuild with ``--against``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpuforge import layout as oci
from tpuforge import registry
from tpuforge.console import Progress, duration
from tpuforge.errors import Exit, ForgeError
from tpuforge.host import which
from tpuforge.images import published
from tpuforge.images.choice import choose
from tpuforge.images.context import Target
from tpuforge.images.differences import compare, look_into
from tpuforge.images.engine import ensure_engine
from tpuforge.paths import ROOT, exclusive, out_dir
from tpuforge.pins import load
from tpuforge.process import clean_env, run
from tpuforge.records import read_record
from tpuforge.verb import Outcome, add_image, main_of, parser

VERB = "reproduce"
SHOWN = 10
"""Differences that are named."""
FEWEST = 2
"""Rebuilds that can be compared."""
_WAYS = 3
_FIRST = "first"
_BAKE_S = 3600.0
_ASK_S = 60.0
# what was fetched, all of it by digest; what other stages made of it is made again
_INPUTS = ("wheelhouse", "debs", "bazel/bazelisk", "python")
# no user of this number is expected anywhere; Debian gives out 1000 to 59999 to people
_STRANGER = 61234
_PLACES = (
    ("POSIX", "Pacific/Chatham"),
    ("tr_TR.UTF-8", "America/St_Johns"),
    ("C", "Asia/Kathmandu"),
)
_FOUND = {"image": str, "python": str, "flavour": str, "name": str, "manifest_digest": str}
# an engine of our own has nobody else to tidy up: many rebuilds would fill its disk
_KEPT_CACHE = "10gb"


@dataclass(frozen=True)
class Way:
    """How a rebuild is made.

    Attributes:
        folder: The name of its out folder.
        umask: Its umask.
        checkout: Where its code, locks and files are.
        variables: Of its environment.
        before: Words before its command line, such as those that make it another user.
        told: What is other than in an ordinary bake, in words.
        python: The Python that runs it.
    """

    folder: str
    umask: str
    checkout: Path
    variables: Mapping[str, str]
    before: tuple[str, ...]
    told: tuple[str, ...]
    python: str = sys.executable

    def words(self, command: Sequence[str]) -> list[str]:
        """The command line of something that is run in this way.

        Args:
            command: The program and its arguments. The shell starts it, not what changes the user:
                that still has the rights to reach a program which the other user has not.
        """
        return [*self.before, "/bin/sh", "-c", f'umask {self.umask}; exec "$@"', "sh", *command]


def differences(first: Path, second: Path) -> Iterator[str]:
    """Name what differs between the images of two layouts.

    Args:
        first: A layout.
        second: Another.

    Yields:
        Sentences: the layer, the path and the attribute.

    Raises:
        ForgeError: If a layout is damaged.
    """
    return (item.text for item in compare(first, second))


def rebuild(
    target: Target, top: Path, number: int, engine: Mapping[str, Any], progress: Progress
) -> tuple[Way, dict[str, Any], float]:
    """Bake an image from nothing, in an out folder of its own.

    Args:
        target: The image.
        top: The folder that gets the out folder, and a copy of the repository for some.
        number: Which rebuild it is, from 1. The first is an ordinary one, the second has other
            files, the others have another repository, place and user as well.
        engine: The record of the engine.
        progress: Told what happens.

    Returns:
        How it was made, its ``image.json``, and the seconds that the bake took.

    Raises:
        ForgeError: If the bake fails; with its own exit code.
    """
    with progress.step(f"preparing rebuild {number}"):
        way = _prepare(top, number, engine, progress)
    out = top / way.folder
    words = [way.python, "-m", "tpuforge.images.bake", "--no-cache", "--no-load"]
    words += ["--image", target.image]
    words += ["--python", target.python] if target.python else []
    words += ["--flavour", target.flavour] if target.flavour else []
    with progress.step(f"rebuild {number} of {target.slug}"):
        started = time.monotonic()
        done = run(
            way.words(words),
            timeout=_BAKE_S,
            env=clean_env(**way.variables),
            cwd=way.checkout,
            check=False,
            on_line=progress.detail,
            doing=f"baking in {out}",
        )
        spent = time.monotonic() - started
    if done.code != 0:
        raise ForgeError(
            f"the bake in {out} failed:\n{done.tail}",
            expected="bakes to compare",
            mend="./forge fetch_wheel, ./forge bake, then ./forge reproduce",
            exit_code=Exit(done.code) if done.code in set(Exit) else Exit.CANNOT,
        )
    record = json.loads((out / "images" / target.slug / "image.json").read_text(encoding="utf-8"))
    if engine["private"] and number >= _WAYS:
        keep = ["--force", "--keep-storage", _KEPT_CACHE]
        words = [engine["docker"], "buildx", "prune", "--builder", engine["builder"], *keep]
        run(words, timeout=_BAKE_S, env=clean_env(**engine["env"]), check=False)
    return way, dict(record), spent


def _prepare(top: Path, number: int, engine: Mapping[str, Any], progress: Progress) -> Way:
    variables = {**engine["env"], "PYTHONPATH": str(ROOT / "src")}
    if number == 1:
        out = top / _FIRST
        fill(out, copies=False, base=out_dir())
        variables |= {"TPUFORGE_OUT": str(out)}
        return Way(out.name, "022", ROOT, variables, (), ("another folder",))
    told = ["another folder", "wheels of another time", "umask 077"]
    if number == 2:
        # a space and a letter outside ASCII, as in many a home folder
        out = top / "second é"
        fill(out, copies=True)
        variables |= {"TPUFORGE_OUT": str(out)}
        told += ["a base made anew", "a folder with a space and an accent"]
        return Way(out.name, "077", ROOT, variables, (), tuple(told))
    language, zone = _PLACES[number % len(_PLACES)]
    out, checkout, home = (top / f"{what}-{number}" for what in ("out", "checkout", "home"))
    # the first has a base in any case; another user may not be able to make one
    fill(out, copies=True, base=top / _FIRST)
    _copy_repository(checkout, number)
    home.mkdir()
    variables |= {
        "HOME": str(home),
        "LANG": language,
        "LC_ALL": language,
        "PYTHONPATH": str(checkout / "src"),
        "TPUFORGE_OUT": str(out),
        "TZ": zone,
    }
    told += ["a copy of the repository of another time and other modes"]
    told += [f"locale {language}", f"time zone {zone}"]
    way = Way(out.name, "077", checkout, variables, (), tuple(told))
    return _as_stranger(way, (out, checkout, home), top / f"engine-{number}", engine, progress)


def fill(out: Path, *, copies: bool, base: Path | None = None) -> None:
    """Give an out folder what a bake reads, and nothing that one made.

    Args:
        out: The folder.
        copies: Copies with a time of their own, instead of links.
        base: The out folder whose base it gets; it is made anew if not given.
    """
    sources = [(out_dir(), folder) for folder in _INPUTS]
    for source, folder in [*sources, *([(base, "base")] if base is not None else [])]:
        for path in (source / folder).rglob("*"):
            if not path.is_file() or ".partial" in path.parts:
                continue
            copy = out / folder / path.relative_to(source / folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if copies:
                shutil.copyfile(path, copy)
                os.utime(copy, (1, 1))
            else:
                _link(path, copy)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        # some file systems have no hard links
        shutil.copy2(source, target)


def _copy_repository(target: Path, number: int) -> None:
    """Copy what belongs to the repository, with times and modes that git would not give it."""
    out = out_dir()

    def ignored(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder)
        left_out = [name for name in names if name.startswith(".") or name == "__pycache__"]
        return left_out + [name for name in names if inside / name in (out, ROOT / "out")]

    shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_symlink():
            continue
        executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
        path.chmod(0o700 if executable else 0o600)
        os.utime(path, (number * 86400, number * 86400))


def _as_stranger(
    way: Way, folders: Sequence[Path], room: Path, engine: Mapping[str, Any], progress: Progress
) -> Way:
    """Let another user make a rebuild, where that can be arranged; it is said where it cannot."""

    def same(why: str) -> Way:
        progress.note(f"this rebuild has the same user as the others: {why}")
        return replace(way, told=(*way.told, "same user"))

    setpriv = which("setpriv")
    if os.geteuid() != 0 or not setpriv:
        return same("only root can work as another, and needs setpriv for it")
    groups, variables = ["--clear-groups"], dict(way.variables)
    host = engine["docker_host"]
    if host.startswith("unix://"):
        socket = Path(host.removeprefix("unix://"))
        groups = ["--groups", str(socket.stat().st_gid)]
        # the folder of a private engine's socket is root's alone; a second name of it is not
        room.mkdir()
        room.chmod(0o755)
        second = room / "docker.sock"
        try:
            second.hardlink_to(socket)
        except OSError as error:
            return same(f"the engine's socket cannot have a second name: {error.strerror}")
        variables |= {"DOCKER_HOST": f"unix://{second}"}
        variables.pop("DOCKER_CONTEXT", None)
    before = [setpriv, "--reuid", str(_STRANGER), "--regid", str(_STRANGER), *groups]
    before += ["--inh-caps=-all"]
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, _STRANGER, _STRANGER, follow_symlinks=False)
    told = (*way.told, f"user {_STRANGER}")
    why = ""
    for python, modules in _pythons(way.variables["PYTHONPATH"]):
        other = replace(way, before=tuple(before), told=told, python=python)
        other = replace(other, variables={**variables, "PYTHONPATH": modules})
        asked = _ask(other, [python, "-c", "import tpuforge.images.bake"])
        why = why or asked
        if not asked:
            why = _ask(other, [engine["docker"], "version"])
            return same(f"another cannot reach the engine: {why}") if why else other
    return same(f"another cannot run what this one runs: {why}")


def _pythons(path: str) -> list[tuple[str, str]]:
    """Pythons that another user may be able to run, each with its PYTHONPATH.

    This one often stands in somebody's home folder; the system's of the same version takes the
    packages of this one, where it is there.
    """
    found = [(sys.executable, path)]
    system = shutil.which(f"python3.{sys.version_info[1]}", path="/usr/local/bin:/usr/bin")
    if system:
        found.append((system, f"{path}:{sysconfig.get_paths()['purelib']}"))
    return found


def _ask(way: Way, question: Sequence[str]) -> str:
    """Try something as a rebuild would do it; why it failed, or empty."""
    done = run(way.words(question), timeout=_ASK_S, env=clean_env(**way.variables), check=False)
    return (done.tail.splitlines() or [f"exit code {done.code}"])[-1] if done.code else ""


def reproduce(
    target: Target, times: int, engine: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """Bake an image several times from nothing and compare each with the first.

    Args:
        target: The image.
        times: How often; at least two.
        engine: The record of the engine.
        progress: Told what happens.

    Returns:
        ``name``, ``digests``, ``equal`` (how many agree with the first), ``finished`` (the digest
        of the finished image of the very same inputs, or null), ``rebuilds``, ``differences`` (the
        first ten), ``differences_in_all``, ``looked_into`` and ``kept`` (the folder with the images
        that differ, or null).

    Raises:
        ForgeError: If a bake fails, or what it bakes from changes meanwhile.
    """
    top = out_dir() / "reproduce" / target.slug
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True)
    rebuilds: list[dict[str, Any]] = []
    layouts: list[Path] = []
    finished = ""
    inputs: dict[str, Any] = {}
    moved: set[str] = set()
    for number in range(1, times + 1):
        try:
            way, record, spent = rebuild(target, top, number, engine, progress)
        except ForgeError:
            if number > 1:
                # the logs of the failed one may be read; the image before it only fills the disk
                shutil.rmtree(top / _FIRST, ignore_errors=True)
            raise
        digest = record["manifest_digest"]
        told = {"digest": digest, "seconds": round(spent, 1), "differs_in": list(way.told)}
        rebuilds.append(told)
        inputs = inputs or record["inputs"]
        moved |= {name for name, value in record["inputs"].items() if inputs.get(name) != value}
        if number == 1:
            finished = _finished(target, record)
        layout = top / way.folder / "images" / target.slug / "oci"
        # the first, and the first that is another, are enough to tell what differs
        if number == 1 or (digest != rebuilds[0]["digest"] and len(layouts) == 1):
            layouts.append(layout)
        else:
            shutil.rmtree(top / way.folder)
        for name in ("checkout", "home", "engine"):
            shutil.rmtree(top / f"{name}-{number}", ignore_errors=True)
    digests = [one["digest"] for one in rebuilds]
    if len(layouts) == 1 and finished and finished != digests[0]:
        layouts.append(target.finished / "oci")
    found = list(compare(*layouts)) if len(layouts) > 1 else []
    if found and moved:
        shutil.rmtree(top)
        raise ForgeError(
            f"{', '.join(sorted(moved))} changed while {target.slug} was being baked",
            expected="a checkout that stays as it is until the last rebuild",
            mend="run the same command again, and leave the checkout alone meanwhile",
        )
    data = {
        "name": target.name,
        "digests": digests,
        "equal": digests.count(digests[0]),
        "finished": finished or None,
        "rebuilds": rebuilds,
        "differences": [item.text for item in found[:SHOWN]],
        "differences_in_all": len(found),
        "looked_into": look_into(layouts[0], layouts[1], found[:SHOWN]) if found else [],
        "kept": str(top) if found else None,
    }
    if not found:
        shutil.rmtree(top)
    return data


def _finished(target: Target, record: Mapping[str, Any]) -> str:
    """The digest of the finished image, if it has the very inputs of a rebuild; else empty."""
    form = {"manifest_digest": str, "key": str}
    known = read_record(target.finished / "image.json", str(record["schema"]), form)
    return str(known["manifest_digest"]) if known and known["key"] == record["key"] else ""


def baked() -> list[dict[str, str]]:
    """The images of the set that were baked here, as their records name them.

    Images with a wheel that was given to the bake are left out: the locks do not make them again.
    """
    found = []
    for path in sorted((out_dir() / "images").glob("*/image.json")):
        record = read_record(path, "tpuforge.image/1", _FOUND)
        if record is not None and not record.get("overlay"):
            found.append({key: str(record[key]) for key in _FOUND})
    return found


def _targets(options: argparse.Namespace) -> list[Target]:
    pins = load()
    if not options.all:
        return [choose(options, pins)]
    if options.image or options.python or options.flavour:
        raise ForgeError(
            "--all is every image that was baked here",
            expected="--all without --image, --python and --flavour",
            mend="./forge reproduce --all",
        )
    found = [
        choose(
            argparse.Namespace(
                image=one["image"], python=one["python"] or None, flavour=one["flavour"] or None
            ),
            pins,
        )
        for one in baked()
    ]
    if not found:
        raise ForgeError(
            "no image was baked here yet",
            expected="images in out/images",
            mend="./forge bake",
        )
    return found


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.against:
        if options.all or options.image or options.python or options.flavour:
            raise ForgeError(
                "a published image says itself which one it is",
                expected="--against without --all, --image, --python and --flavour",
                mend=f"./forge reproduce --against {options.against}",
            )
        return against(options, progress)
    if options.finished:
        raise ForgeError(
            "--finished says nothing without --against",
            expected="--against HOST/NAME@sha256:… --finished",
            mend="leave it out: rebuilds are held against the finished image in any case",
        )
    if options.times < FEWEST:
        raise ForgeError(
            f"--times {options.times} leaves nothing to compare",
            expected=f"--times {FEWEST} or more",
            mend="./forge reproduce --times 3",
        )
    targets = _targets(options)
    engine = ensure_engine(progress)
    all_data: list[dict[str, Any]] = []
    failed: dict[str, ForgeError] = {}
    for target in targets:
        try:
            with exclusive(
                f"reproduce-{target.slug}", lambda who: progress.note(f"waiting for {who}")
            ):
                all_data.append(reproduce(target, options.times, engine, progress))
        except ForgeError as error:
            if not options.all or error.exit_code == Exit.INTERRUPTED:
                raise
            # hours may have gone into the others
            failed[target.name] = error
            progress.note(f"{target.name}: {error.found}", loud=True)
    errors = {name: error.as_dict() for name, error in failed.items()}
    data = {"images": all_data, "failed": errors} if options.all else all_data[0]
    text = "\n".join(line for one in all_data for line in _lines(one))
    bad = [one["name"] for one in all_data if one["differences_in_all"]]
    good = [f"{one['name']}, {one['digests'][0]}" for one in all_data if one["name"] not in bad]
    parts = [
        (f"not reproducible: {', '.join(bad)}", bad),
        (f"no bakes to compare of {', '.join(failed)}", failed),
        (f"{options.times} of {options.times} agree: {', '.join(good)}", good),
    ]
    code = Exit.FAULT if bad else Exit.CANNOT if failed else Exit.OK
    summary = "; ".join(said for said, there in parts if there)
    return Outcome("done", summary, data, exit_code=code, text=text)


def against(options: argparse.Namespace, progress: Progress) -> Outcome:
    """Hold a published image against what this checkout bakes.

    Args:
        options: The verb's, with the image's name in ``against``.
        progress: Told what happens.

    Raises:
        ForgeError: If the image cannot be had or is none of the set, or the bake fails.
    """
    pins, access = load(), registry.from_options(options, progress)
    image = published.look(options.against, access)
    target = published.target_of(image, pins)
    digest = image.reference.digest
    data: dict[str, Any] = {"name": target.name, "published": digest}
    others = published.other_inputs(image, target, pins, progress)
    if others:
        text = "\n".join(f"  {line}" for line in others)
        return Outcome(
            "done",
            f"{image.reference} was made from other inputs than this checkout's, so nothing was "
            "baked: check out the commit that its provenance names, then run it again",
            data | {"other_inputs": others},
            exit_code=Exit.FAULT,
            text=text,
        )
    top = out_dir() / "reproduce" / f"{target.slug}-published"
    with exclusive(f"reproduce-{target.slug}", lambda who: progress.note(f"waiting for {who}")):
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir(parents=True)
        if options.finished:
            mine = published.finished(target, pins)
            told = "the finished image"
        else:
            way, _, _ = rebuild(target, top, 2, ensure_engine(progress), progress)
            mine = top / way.folder / "images" / target.slug / "oci"
            told = "a bake from nothing"
        own = oci.read_image(mine).manifest.digest
        data |= {"own": own, "other_inputs": [], "finished": bool(options.finished)}
        if own == digest:
            shutil.rmtree(top)
            summary = f"{image.reference} is, bit for bit, {told} of this checkout"
            return Outcome("done", summary, data)
        theirs = published.stage(image, mine, top / "published", access)
        found = list(compare(theirs, mine))
        more = look_into(theirs, mine, found[:SHOWN])
    data |= {
        "differences": [item.text for item in found[:SHOWN]],
        "differences_in_all": len(found),
        "looked_into": more,
        "kept": str(top),
    }
    return Outcome(
        "done",
        f"{image.reference} is not what this checkout bakes: {told} is {own}; both are kept in "
        f"{top}",
        data,
        exit_code=Exit.FAULT,
        text="\n".join(f"  {line}" for line in (*data["differences"], *more)),
    )


def _lines(data: Mapping[str, Any]) -> list[str]:
    """A result for people."""
    lines = [f"{data['name']}: {data['equal']} of {len(data['digests'])} bakes from nothing agree"]
    for number, one in enumerate(data["rebuilds"], 1):
        how = ", ".join(one["differs_in"])
        lines.append(f"  {number}  {one['digest'][:19]}…  {duration(one['seconds'])}  {how}")
    if data["finished"]:
        lines.append(f"     {data['finished'][:19]}…  the finished image, of the same inputs")
    if data["differences_in_all"]:
        lines.append(f"  {data['differences_in_all']} differences; kept in {data['kept']}:")
        lines += [f"  {line}" for line in (*data["differences"], *data["looked_into"])]
    return lines


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Bake again and again from nothing, and compare the images bit for bit.")
    add_image(made, "the lock to bake from")
    made.add_argument("--all", action="store_true", help="every image that was baked here")
    made.add_argument(
        "--times", type=int, default=_WAYS, metavar="N", help=f"rebuilds (default: {_WAYS})"
    )
    made.add_argument(
        "--against",
        metavar="HOST/NAME@sha256:…",
        help="hold a published image against a rebuild",
    )
    made.add_argument(
        "--finished",
        action="store_true",
        help="hold it against the finished image in out/images, and bake nothing",
    )
    registry.add_options(made)
    return made


main = main_of(VERB, arguments, _act)


if __name__ == "__main__":
    raise SystemExit(main())

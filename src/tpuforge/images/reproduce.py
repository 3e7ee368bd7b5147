"""``reproduce``: bake an image twice from nothing and compare, bit for bit.

The second bake has a folder of another name, wheels with other times, another umask and a base
made anew. When the manifests differ, the first differing files are named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpuforge.console import Progress
from tpuforge.errors import Exit, ForgeError
from tpuforge.images import layout as oci
from tpuforge.images.bake import choose
from tpuforge.images.context import Target
from tpuforge.images.engine import ensure_engine
from tpuforge.paths import ROOT, exclusive, out_dir
from tpuforge.pins import load
from tpuforge.process import clean_env, run
from tpuforge.verb import Outcome, parser, run_verb

VERB = "reproduce"
SHOWN = 10
"""Differences that are named."""
# a space and a letter outside ASCII, as in many a home folder
_FOLDERS = ("first", "second é")
_BAKE_S = 3600.0


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
    one, two = oci.read_image(first), oci.read_image(second)
    if one.manifest.digest == two.manifest.digest:
        return
    configs = [
        json.loads(image.config.path(at).read_bytes())
        for image, at in ((one, first), (two, second))
    ]
    for key in sorted({*configs[0], *configs[1]} - {"rootfs"}):
        if configs[0].get(key) != configs[1].get(key):
            yield f"config: {key}: {configs[0].get(key)!r} and {configs[1].get(key)!r}"
    if len(one.layers) != len(two.layers):
        yield f"{len(one.layers)} layers and {len(two.layers)} layers"
    for number, (left, right) in enumerate(zip(one.layers, two.layers, strict=False), 1):
        if left.digest == right.digest:
            continue
        title = f"layer {number} ({oci.content(first, left).what})"
        entries = [_entries(first, left), _entries(second, right)]
        found = False
        for path in sorted({*entries[0], *entries[1]}):
            a, b = (side.get(path) for side in entries)
            if a is None or b is None:
                found = True
                yield f"{title}: {path}: only in the {'second' if a is None else 'first'}"
                continue
            for attribute in a:
                if a[attribute] != b[attribute]:
                    found = True
                    yield f"{title}: {path}: {attribute} {a[attribute]} and {b[attribute]}"
        if not found and list(entries[0]) != list(entries[1]):
            yield f"{title}: the same files in another order"
        elif not found:
            yield f"{title}: the same files, compressed or archived in another way"
    if one.annotations != two.annotations:
        yield f"annotations: {one.annotations} and {two.annotations}"


def _entries(layout: Path, layer: oci.Blob) -> dict[str, dict[str, str]]:
    """Every path of a layer with its attributes, in the layer's order."""
    found: dict[str, dict[str, str]] = {}
    with oci.open_layer(layout, layer) as tar:
        for entry in tar:
            body = tar.extractfile(entry) if entry.isreg() else None
            content = hashlib.sha256()
            while body is not None and (chunk := body.read(1 << 20)):
                content.update(chunk)
            found[entry.name] = {
                "type": _KINDS.get(entry.type, "other"),
                "mode": f"{entry.mode:04o}",
                "owner": f"{entry.uid}:{entry.gid}",
                "time": str(entry.mtime),
                "link": entry.linkname,
                "size": str(entry.size),
                "content": content.hexdigest()[:12] if body is not None else "",
            }
    return found


_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
}


def _act(options: argparse.Namespace, progress: Progress) -> Outcome:
    pins = load()
    target = choose(options, pins)
    engine = ensure_engine(progress)
    top = out_dir() / "reproduce" / target.slug
    with exclusive(f"reproduce-{target.slug}", lambda who: progress.note(f"waiting for {who}")):
        shutil.rmtree(top, ignore_errors=True)
        records = []
        for folder in _FOLDERS:
            out = top / folder
            with progress.step(f"preparing {folder}"):
                _prepare(out, fresh=folder != _FOLDERS[0])
            with progress.step(f"baking {folder}"):
                records.append(
                    _bake(target, out, engine["env"], progress, fresh=folder != _FOLDERS[0])
                )
        layouts = [top / folder / "images" / target.slug / "oci" for folder in _FOLDERS]
        digests = [str(record["manifest_digest"]) for record in records]
        found = list(differences(*layouts))
        data: dict[str, Any] = {
            "name": target.name,
            "digests": digests,
            "differences": found[:SHOWN],
            "differences_in_all": len(found),
        }
        if digests[0] == digests[1]:
            shutil.rmtree(top)
            return Outcome("done", f"two bakes of {target.name} agree: {digests[0]}", data)
    text = "\n".join(f"  {line}" for line in found[:SHOWN])
    return Outcome(
        "done",
        f"two bakes of {target.name} differ, in {len(found)} ways; both are kept in {top}",
        data,
        exit_code=Exit.FAULT,
        text=text,
    )


def _prepare(out: Path, *, fresh: bool) -> None:
    """Give a bake its inputs: links, or (fresh) copies with times of their own and no base."""
    source = out_dir()
    for wheel in (source / "wheelhouse").glob("*/*.whl"):
        copy = out / "wheelhouse" / wheel.parent.name / wheel.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            shutil.copyfile(wheel, copy)
            os.utime(copy, (1, 1))
        else:
            _link(wheel, copy)
    # what the build stage keeps of Bazelisk goes into the builder
    for folder in ("debs", "bazel/bazelisk", *(() if fresh else ("base",))):
        for path in (source / folder).rglob("*"):
            if path.is_file():
                copy = out / folder / path.relative_to(source / folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                _link(path, copy)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        # some file systems have no hard links
        shutil.copy2(source, target)


def _bake(
    target: Target, out: Path, engine: dict[str, str], progress: Progress, *, fresh: bool
) -> dict[str, Any]:
    """Bake in an out folder of its own, as a process with its own umask."""
    umask = "077" if fresh else "022"
    words = [sys.executable, "-m", "tpuforge.images.bake", "--no-cache", "--no-load"]
    words += ["--image", target.image]
    words += ["--python", target.python, "--flavour", target.flavour] if target.python else []
    done = run(
        ["/bin/sh", "-c", f'umask {umask}; exec "$@"', "bake", *words],
        timeout=_BAKE_S,
        env=clean_env(**engine, TPUFORGE_OUT=str(out), PYTHONPATH=str(ROOT / "src")),
        check=False,
        on_line=progress.detail,
        doing=f"baking in {out}",
    )
    if done.code != 0:
        raise ForgeError(
            f"the bake in {out} failed:\n{done.tail}",
            expected="two bakes to compare",
            mend="forge fetch_wheel, forge bake, then forge reproduce",
            exit_code=Exit(done.code) if done.code in set(Exit) else Exit.CANNOT,
        )
    record = json.loads((out / "images" / target.slug / "image.json").read_text(encoding="utf-8"))
    return dict(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        The exit code: 0 when the two bakes agree, 1 when they differ.
    """
    made = parser(VERB, "Bake twice from nothing, and compare the images bit for bit.")
    made.add_argument("--image", help="the image, as in images/docker-bake.hcl")
    made.add_argument("--python", metavar="X.Y", help="the Python version")
    made.add_argument("--flavour", help="the lock to bake from")
    return run_verb(VERB, made, _act, argv)


if __name__ == "__main__":
    raise SystemExit(main())

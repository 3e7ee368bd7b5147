"""``pull``: take an image from a registry by its digest, into a layout or into the engine.

A tag names one image today and another one tomorrow, so an image is taken by its digest alone, and
every byte of it is checked. What of it this machine has already is not taken again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path

from tpuforge import layout as oci
from tpuforge.console import Progress, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.host import which
from tpuforge.images import bare, builder, context, simulation
from tpuforge.images.engine import ClassicError, ensure_engine, user_target
from tpuforge.paths import exclusive, out_dir, read_json, write_json
from tpuforge.process import clean_env, run
from tpuforge.registry import (
    Reference,
    Registry,
    add_options,
    from_options,
)
from tpuforge.verb import Outcome, main_of, parser

VERB = "pull"
SCHEMA = "tpuforge.pulled/1"
_LOAD_S = 900.0
_ASK_S = 60.0


def pull(ref: Reference, registry: Registry, progress: Progress, *, into: str) -> Outcome:
    """Take one image.

    Args:
        ref: It, with its digest.
        registry: Access to the registry.
        progress: Told what happens.
        into: ``layout``, or ``engine`` for both.

    Returns:
        What was done.

    Raises:
        NotThereError: If there is no such image.
        ForgeError: If the registry gives other bytes (exit code 1), does not answer or refuses
            (2), or the engine does.
    """
    notes = []
    if ref.tag:
        now = registry.find(ref.at_tag(ref.tag))
        if now != ref.digest:
            notes.append(f"{ref.at_tag(ref.tag)} names {now or 'nothing'} now; the digest counts")
    folder = out_dir() / "pulled" / ref.digest.removeprefix("sha256:")
    layout = folder / "oci"
    with exclusive(
        f"pull-{folder.name[:16]}", lambda who: progress.note(f"waiting for {who}, which takes it")
    ):
        before = read_json(folder / "pulled.json")
        # it stands for something whole
        (folder / "pulled.json").unlink(missing_ok=True)
        copied = registry.copy_out(ref, layout, _seeds(layout))
        attached = registry.copy_referrers_out(ref, folder / "referrers")
        image = oci.read_image(layout)
        record = {
            "schema": SCHEMA,
            "reference": str(ref.at_digest(ref.digest)),
            "digest": copied.digest,
            "referrers": attached,
        }
        write_json(folder / "pulled.json", record)
        name = _name(ref, image)
        loaded, line = False, ""
        if into == "engine":
            loaded, line = _load(layout, image, name, progress)
    for note in notes:
        progress.note(note)
    data = {
        "registry": ref.host,
        "repository": ref.name,
        "digest": copied.digest,
        "layout": layout.relative_to(out_dir()).as_posix(),
        "taken_blobs": copied.moved,
        "taken_bytes": copied.moved_bytes,
        "known_blobs": copied.there,
        "referrers": attached,
        "name": name if into == "engine" else "",
        "run_line": line,
    }
    where = f"{name} in the engine" if into == "engine" else str(layout)
    taken = str(copied) if copied.moved else f"all {copied.there} blobs were on this machine"
    summary = f"{ref.at_digest(ref.digest)}: {taken}; {where}"
    changed = copied.moved or loaded or before != record
    text = f"  to run it:  {line}" if line else ""
    return Outcome("done" if changed else "unchanged", summary, data, notes, text=text)


def _seeds(own: Path) -> list[Path]:
    """The layouts of this machine that may have some of the blobs."""
    found = [*out_dir().glob("images/*/oci"), *out_dir().glob("pulled/*/oci")]
    return sorted(path for path in found if path != own)


def _name(ref: Reference, image: oci.Image) -> str:
    """What the image is called in the engine: its tag, else its version, else its digest."""
    version = image.labels.get("org.opencontainers.image.version", "")
    # a stranger's version may be no tag, such as 1.0+cpu
    for tag in (ref.tag, version):
        with contextlib.suppress(ForgeError):
            return str(ref.checked_tag(tag))
    return str(ref.at_tag(ref.digest.removeprefix("sha256:")[:12]))


def _run_line(name: str, labels: Mapping[str, str], private_host: str) -> str:
    """The line that runs an image of this project; one of a private engine as it can run there."""
    makers = {one.NAME: one.run_line for one in (bare, builder, simulation)}
    made = labels.get("io.tpuforge.image", "")
    if made in makers:
        line = str(makers[made](name))
    elif not made:
        return shlex.join([*_docker(private_host), "run", "--rm", "-it", name])
    elif private_host:
        # a private engine is on the machine that bakes, which has no TPU to hand in
        return shlex.join([*_docker(private_host), "run", "--rm", name, "versions"])
    else:
        line = context.run_line(name)
    return line.replace("docker ", f"{shlex.join(_docker(private_host))} ")


def _docker(private_host: str) -> list[str]:
    return ["docker", "-H", private_host] if private_host else ["docker"]


def _engine(progress: Progress) -> tuple[str, Mapping[str, str], str]:
    """The Docker client, the variables that lead it to the engine, and a private one's address."""
    try:
        engine = ensure_engine(progress)
    except ClassicError:
        # it cannot bake, but it takes images
        docker = which("docker")
        return docker, user_target(docker).env, ""
    host = str(engine["docker_host"]) if engine["private"] else ""
    return str(engine["docker"]), engine["env"], host


def _load(layout: Path, image: oci.Image, name: str, progress: Progress) -> tuple[bool, str]:
    """Put the image into the engine's store.

    Returns:
        Whether it was not there yet, and the line that runs it.
    """
    docker, variables, host = _engine(progress)
    line = _run_line(name, image.labels, host)
    env = clean_env(**variables)
    wanted = {image.manifest.digest, image.config.digest}
    ask = [docker, "image", "inspect", "--format", "{{.Id}}", name]

    def there() -> bool:
        done = run(ask, timeout=_ASK_S, env=env, check=False, doing=f"looking for {name}")
        return done.code == 0 and bool(wanted & set(done.output.split()))

    if there():
        return False, line
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            try:
                oci.write_archive(layout, image, name, file)
            except BrokenPipeError:
                # the client has ended, and says why
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with progress.step(f"loading {size(image.compressed)} into the engine"):
            run([docker, "load"], timeout=_LOAD_S, env=env, stdin=reading, doing=f"loading {name}")
    finally:
        os.close(reading)
        writer.join()
    if not there():
        raise ForgeError(
            f"the engine has another image under {name} than the one it was given",
            expected=image.manifest.digest,
            mend=f"docker rmi {name}, then run the same command again",
            exit_code=Exit.FAULT,
        )
    return True, line


def _pull(options: argparse.Namespace, progress: Progress) -> Outcome:
    ref = Reference.parse(options.reference)
    registry = from_options(options, progress)
    if not ref.digest:
        now = registry.digest(ref)
        raise ForgeError(
            f"{ref} has no digest: a tag can name another image tomorrow",
            expected="HOST/NAME[:TAG]@sha256:…",
            mend=f"today it names this one: ./forge pull {ref}@{now}",
        )
    return pull(ref, registry, progress, into=options.into)


def arguments() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = parser(VERB, "Take an image from a registry by its digest.")
    made.add_argument("reference", metavar="HOST/NAME[:TAG]@sha256:…", help="the image")
    made.add_argument(
        "--into",
        choices=("layout", "engine"),
        default="layout",
        help="an OCI layout in out/pulled (the default), or the engine as well",
    )
    add_options(made)
    return made


main = main_of(VERB, arguments, _pull)


if __name__ == "__main__":
    raise SystemExit(main())

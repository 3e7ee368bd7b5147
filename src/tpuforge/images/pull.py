"""``pull``: take an image from a registry by its digest, into a layout or into the engine.

A tag names one image today and another one tomorrow, so an image is taken by its digest alone, and
every byte of it is checked. What of it this machine has already is not taken again.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpuforge import layout as oci
from tpuforge.console import Progress, size
from tpuforge.errors import Exit, ForgeError
from tpuforge.host import which
from tpuforge.images.engine import ClassicError, ensure_engine, user_target
from tpuforge.paths import exclusive, out_dir, write_json
from tpuforge.process import clean_env, run
from tpuforge.registry import (
    Reference,
    Registry,
    add_options,
    from_options,
)
from tpuforge.verb import Outcome, parser, run_verb

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
        loaded = into == "engine" and _load(layout, image, name, progress)
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
    }
    where = f"{name} in the engine" if into == "engine" else str(layout)
    summary = f"{ref.at_digest(ref.digest)}: {copied}; {where}"
    return Outcome("done" if copied.moved or loaded else "unchanged", summary, data, notes)


def _seeds(own: Path) -> list[Path]:
    """The layouts of this machine that may have some of the blobs."""
    found = [*out_dir().glob("images/*/oci"), *out_dir().glob("pulled/*/oci")]
    return sorted(path for path in found if path != own)


def _name(ref: Reference, image: oci.Image) -> str:
    """What the image is called in the engine: its tag, else its version, else its digest."""
    version = image.labels.get("org.opencontainers.image.version", "")
    tag = ref.tag or version or ref.digest.removeprefix("sha256:")[:12]
    return str(ref.at_tag("").checked_tag(tag))


def _engine(progress: Progress) -> tuple[str, Mapping[str, str]]:
    """The Docker client, and the variables that lead it to the engine."""
    try:
        engine = ensure_engine(progress)
    except ClassicError:
        # it cannot bake, but it takes images
        docker = which("docker")
        return docker, user_target(docker).env
    return str(engine["docker"]), engine["env"]


def _load(layout: Path, image: oci.Image, name: str, progress: Progress) -> bool:
    """Put the image into the engine's store; whether it was not there yet."""
    docker, variables = _engine(progress)
    env = clean_env(**variables)
    wanted = {image.manifest.digest, image.config.digest}
    ask = [docker, "image", "inspect", "--format", "{{.Id}}", name]

    def there() -> bool:
        done = run(ask, timeout=_ASK_S, env=env, check=False, doing=f"looking for {name}")
        return done.code == 0 and bool(wanted & set(done.output.split()))

    if there():
        return False
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
    return True


def _pull(options: argparse.Namespace, progress: Progress) -> Outcome:
    ref = Reference.parse(options.reference)
    registry = from_options(options, progress)
    if not ref.digest:
        now = registry.digest(ref)
        raise ForgeError(
            f"{ref} has no digest: a tag can name another image tomorrow",
            expected="HOST/NAME[:TAG]@sha256:…",
            mend=f"today it names this one: forge pull {ref}@{now}",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb.

    Args:
        argv: Its arguments; the process's own if not given.

    Returns:
        Its exit code.
    """
    return run_verb(VERB, arguments(), _pull, argv)


if __name__ == "__main__":
    raise SystemExit(main())

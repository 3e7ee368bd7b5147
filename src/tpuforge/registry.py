"""Images in a registry: put there, taken from there, and read, always by digest.

skopeo copies whole images, byte for byte and only what is missing. The small requests around it,
and all of them where there is no skopeo, are those of :mod:`tpuforge.distribution`. A tag is
put last, after everything that it stands for, and nothing that a registry says is believed: what it
gives is checked by digest.

Formats: OCI image layout, image manifest and index 1.1; the reference grammar of the OCI
distribution specification.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from tpuforge import distribution, host
from tpuforge import layout as oci
from tpuforge.console import Progress, size
from tpuforge.distribution import INDEX, Access, Client, NotThereError, TransientError
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import (
    exclusive,
    out_dir,
    parse_json,
    read_regular,
    scratch_dir,
    sha256_file,
    user_path,
    write_atomic,
    write_json,
)
from tpuforge.process import Completed, clean_env, redact, run

TRIES = 5
"""Attempts at one request or one copy before it is given up."""
_LONGEST_PAUSE_S = 30.0
# a copy may last this long, and longer by what a slow line takes, in bytes per second
_COPY_S = 600.0
_SLOWEST = 100_000
_HOST = re.compile(
    r"(?:localhost|[a-z0-9.-]*\.[a-z0-9.-]+|\[[0-9a-f:]+\]|[a-z0-9-]+(?=:))(?::\d+)?"
)
_NAME = re.compile(
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# what skopeo writes beside blobs: its memory of where they are
_SLACK = 1 << 26
_MOST_ATTACHED = 200
_MOST_SHOWN = 300
_LONGEST_NAME = 255
_CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
# engines take about 125
_MOST_LAYERS = 500
_ATTACHED = "if the image is yours: ./forge sbom, ./forge push; else ask who published it"
_REF_NAME = "org.opencontainers.image.ref.name"
_FATAL = re.compile(r'level=fatal msg="?(?P<why>.*?)"?$', re.MULTILINE)

T = TypeVar("T")


@dataclass(frozen=True)
class Reference:
    """An image in a registry, such as ``registry.example/owner/runtime:0.2.0@sha256:…``.

    Attributes:
        host: The registry, with its port if it has one.
        name: The repository in it.
        tag: Empty if there is none.
        digest: ``sha256:…``; empty if there is none. With both, the digest counts.
    """

    host: str
    name: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a reference.

        Args:
            text: ``host[:port]/name[:tag][@sha256:…]``. The registry has to be named.

        Raises:
            ForgeError: If it is none.
        """
        rest, at, digest = text.partition("@")
        where, slash, path = rest.partition("/")
        name, colon, tag = path.partition(":")
        wrong = ""
        if not slash or not _HOST.fullmatch(where):
            wrong = (
                "it does not begin with a registry, such as registry.example/ or localhost:5000/"
            )
        elif len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
            wrong = (
                f"{_shown(name)!r} cannot be the name of a repository: up to {_LONGEST_NAME} "
                "small letters, digits, - . _ /"
            )
        elif colon and not _TAG.fullmatch(tag):
            wrong = f"{_shown(tag)!r} cannot be a tag"
        elif at and not _DIGEST.fullmatch(digest):
            wrong = f"{_shown(digest)!r} is not a SHA-256 digest"
        else:
            wrong = _wrong_host(where)
        if wrong:
            raise ForgeError(
                f"{_shown(text)!r} is not a reference: {wrong}",
                expected="HOST[:PORT]/NAME[:TAG][@sha256:<64 hex digits>]",
                mend="write it in full",
            )
        return cls(where, name, tag, digest)

    @property
    def repository(self) -> str:
        """Registry and name."""
        return f"{self.host}/{self.name}"

    @property
    def version(self) -> str:
        """What a manifest is asked for by: the digest, else the tag, else ``latest``."""
        return self.digest or self.tag or "latest"

    def at_tag(self, tag: str) -> Self:
        """The same repository at a tag.

        Args:
            tag: The tag.
        """
        return replace(self, tag=tag, digest="")

    def checked_tag(self, tag: str) -> Self:
        """The same repository at a tag that a person gave.

        Args:
            tag: The tag.

        Raises:
            ForgeError: If it cannot be one.
        """
        if not _TAG.fullmatch(tag):
            raise ForgeError(
                f"{_shown(tag)!r} cannot be a tag",
                expected="up to 128 letters, digits, - . _, the first none of - and .",
                mend="choose another --tag",
            )
        return self.at_tag(tag)

    def below(self, name: str) -> Self:
        """A repository under this one.

        Args:
            name: The last part of its name.
        """
        return replace(self, name=f"{self.name}/{name}")

    def at_digest(self, digest: str) -> Self:
        """The same repository at a digest.

        Args:
            digest: ``sha256:…``.
        """
        return replace(self, tag="", digest=digest)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"


def _wrong_host(where: str) -> str:
    """Why nothing can be at an address; empty if something can."""
    try:
        at = urllib.parse.urlsplit(f"//{where}")
        # the port is read when it is asked for
        _ = at.port
        (at.hostname or "").encode("idna")
    except ValueError as error:
        return f"{_shown(where)!r} cannot be the address of a registry ({error})"
    return ""


def _shown(text: str) -> str:
    """What a person gave for a reference, without the password that may stand in it."""
    rest, at, digest = text.rpartition("@")
    if at and digest.startswith("sha"):
        return f"{_shown(rest)}@{digest}"
    # a reference has no user; what stands before the last @ may be a password
    text = f"***@{digest}" if at and digest else text
    return redact(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")


@dataclass(frozen=True)
class Copied:
    """What a copy did.

    Attributes:
        digest: The manifest's digest.
        moved: How many blobs had to be moved. A registry may link some from another repository of
            its own, where skopeo knows that they are there.
        moved_bytes: Their bytes.
        there: How many were there already.
    """

    digest: str
    moved: int
    moved_bytes: int
    there: int

    def __str__(self) -> str:
        if not self.moved:
            return f"all {self.there} blobs were there"
        return f"{self.moved} new blobs, {size(self.moved_bytes)}; {self.there} were there"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a verb the options that say how a registry is reached.

    Args:
        parser: The verb's.
    """
    parser.add_argument(
        "--authfile", metavar="FILE", help="credentials, as docker login writes them"
    )
    parser.add_argument("--ca", metavar="FILE", help="the registry's certificate authority, in PEM")
    parser.add_argument("--plain-http", action="store_true", help="speak HTTP without TLS")
    parser.add_argument(
        "--tries", type=int, default=TRIES, help=f"attempts at one request (default {TRIES})"
    )


def from_options(options: argparse.Namespace, progress: Progress) -> Registry:
    """The access that the options of :func:`add_options` name.

    Args:
        options: The verb's.
        progress: Told what happens.

    Raises:
        ForgeError: If a file is not there, or the number of attempts is none.
    """
    # an empty one is a variable that is not set, and no wish to do without
    ca = user_path(options.ca) if options.ca is not None else None
    if ca is not None and not ca.is_file():
        raise ForgeError(
            f"{ca}: there is no such file",
            expected="a certificate authority in PEM",
            mend="name a readable file with --ca",
        )
    if options.tries < 1:
        raise ForgeError(
            f"--tries {options.tries}", expected="1 or more", mend=f"leave it out for {TRIES}"
        )
    authfile = user_path(options.authfile) if options.authfile is not None else None
    return Registry(progress, Access(authfile, ca, options.plain_http), tries=options.tries)


@dataclass
class Registry:
    """Access to registries.

    Attributes:
        progress: Told what happens.
        access: How they are reached.
        tries: Attempts at one request or one copy.
    """

    progress: Progress
    access: Access = field(default_factory=Access)
    tries: int = TRIES
    _clients: dict[str, Client] = field(default_factory=dict, repr=False)
    _skopeo: str | None = field(default=None, repr=False)

    def manifest(self, ref: Reference) -> bytes:
        """A manifest or index, byte for byte.

        Args:
            ref: Where it is.

        Raises:
            NotThereError: If there is none.
            ForgeError: If the registry does not answer, refuses, or gives other bytes than the
                digest says (exit code 1).
        """
        return self._manifest(ref)[0]

    def digest(self, ref: Reference) -> str:
        """The digest of the manifest at a tag, from its bytes.

        Args:
            ref: Where it is.

        Raises:
            NotThereError: If there is none.
            ForgeError: As :meth:`manifest`.
        """
        return _digest(self.manifest(ref))

    def find(self, ref: Reference) -> str:
        """The digest of the manifest at a tag; empty if there is none.

        Args:
            ref: Where it would be.

        Raises:
            ForgeError: As :meth:`manifest`.
        """
        try:
            return self.digest(ref)
        except NotThereError:
            return ""

    def blob(self, ref: Reference, blob: oci.Blob) -> Path:
        """A blob, checked by digest; it is kept in ``out/registry/blobs``.

        Args:
            ref: A reference into its repository.
            blob: The blob, as its manifest names it (:func:`tpuforge.layout.descriptor`).

        Returns:
            The file. Do not write to it.

        Raises:
            NotThereError: If there is none.
            ForgeError: As :meth:`manifest`.
        """
        path = out_dir() / "registry" / "blobs" / blob.digest.removeprefix("sha256:")
        doing = f"taking {blob.digest[:19]}… from {ref.repository}"
        # two that write to one beginning would call the registry a liar
        with exclusive(
            f"blob-{path.name[:2]}", lambda who: self.progress.note(f"{doing}: {who} does it")
        ):
            if path.is_file() and f"sha256:{sha256_file(path)}" == blob.digest:
                return path
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.progress.step(doing):
                self.take(ref, blob, path.parent / f".{path.name}.partial").replace(path)
        return path

    def document(self, ref: Reference, blob: oci.Blob) -> bytes:
        """A small blob, such as a config or an attached document, checked by digest.

        Args:
            ref: A reference into its repository.
            blob: The blob, as its manifest names it.

        Raises:
            NotThereError: If there is none.
            ForgeError: As :meth:`manifest`, or if it is too large to be one (exit code 1).
        """
        _judge_size(ref, blob)
        return self.blob(ref, blob).read_bytes()

    def take(self, ref: Reference, blob: oci.Blob, target: Path) -> Path:
        """Write a blob to a file, checked by digest.

        Args:
            ref: A reference into its repository.
            blob: The blob, as its manifest names it; no more bytes than its size are taken.
            target: The file; what is there counts as the blob's beginning.

        Returns:
            The file.

        Raises:
            NotThereError: If there is none.
            ForgeError: As :meth:`manifest`.
        """
        client = self._client(ref)
        doing = f"taking {blob.digest[:19]}… from {ref.repository}"
        told = self.progress.advance
        self._patiently(doing, lambda: client.blob(blob.digest, blob.size, target, told))
        return target

    def put(self, ref: Reference, data: bytes, kind: str) -> None:
        """Put a manifest or index under a tag or its digest, and read it back.

        Args:
            ref: Where it goes.
            data: Its bytes.
            kind: Its media type.

        Raises:
            ForgeError: If the registry does not answer or refuses, or then has another one there
                (exit code 1).
        """
        client = self._client(ref)
        self._patiently(f"putting {ref}", lambda: client.put_manifest(ref.version, data, kind))
        self.check(ref, _digest(data))

    def check(self, ref: Reference, digest: str) -> None:
        """Read back what a registry has at a reference.

        Args:
            ref: A tag or a digest.
            digest: What has to be there.

        Raises:
            ForgeError: If it is another one, or nothing; exit code 1.
        """
        found = self.find(ref)
        if found != digest:
            raise ForgeError(
                f"{ref} was put, and the registry now has {found or 'nothing'} there",
                expected=digest,
                mend="somebody else moved the tag, or the registry is not to be trusted: look at "
                "it, then push again with --move",
                exit_code=Exit.FAULT,
            )

    def copy_in(self, layout: Path, ref: Reference) -> Copied:
        """Put the one image of a layout into a repository, by digest, then under its tag.

        What is there is not sent again.

        Args:
            layout: An OCI layout with one image, checked whole before anything is sent.
            ref: The repository; if it has a tag, that comes last.

        Returns:
            What was sent.

        Raises:
            ForgeError: If the layout is damaged, the tag names another image, or the registry has
                other bytes in the end (exit code 1); if it does not answer or refuses (2).
        """
        image = oci.read_image(layout)
        with self.progress.step("checking the layout", image.compressed):
            bad = oci.wrong(layout, image, self.progress.advance)
        if bad:
            raise _damaged(layout, bad[0].digest)
        digest = image.manifest.digest
        client = self._client(ref)
        self._patiently(f"asking {ref.host}", client.ping)
        tags = self.absent_tags(ref, [ref.tag] if ref.tag else [], digest)
        blobs = list(dict.fromkeys((image.config, *image.layers)))
        absent = [blob for blob in blobs if not self._has(client, blob)]
        self._send(layout, image, ref, f"sending {digest[:19]}… to {ref.repository}", absent)
        self.check(ref.at_digest(digest), digest)
        self.tag(layout, ref, tags)
        there = len(blobs) - len(absent)
        return Copied(digest, len(absent), sum(blob.size for blob in absent), there)

    def absent_tags(
        self, ref: Reference, tags: Sequence[str], digest: str, *, move: bool = False
    ) -> list[str]:
        """The tags that do not name an image yet.

        Args:
            ref: The repository.
            tags: The tags.
            digest: The image that they are to name.
            move: Whether they may name another one.

        Raises:
            ForgeError: If one does and may not; exit code 1.
        """
        absent = []
        for tag in tags:
            found = self.find(ref.at_tag(tag))
            if found and found != digest and not move:
                raise ForgeError(
                    f"{ref.at_tag(tag)} names another image: {found}",
                    expected=f"{digest}, or no image yet",
                    mend="people may rely on it: choose another --tag, or say --move",
                    exit_code=Exit.FAULT,
                )
            absent += [tag] if found != digest else []
        return absent

    def tag(self, layout: Path, ref: Reference, tags: Sequence[str]) -> None:
        """Let tags name an image that is in the repository.

        Args:
            layout: The layout that it came from.
            ref: The repository.
            tags: The tags.

        Raises:
            ForgeError: As :meth:`put`.
        """
        manifest = oci.read_image(layout).manifest
        data = manifest.path(layout).read_bytes()
        for name in tags:
            self.put(ref.at_tag(name), data, manifest.media_type)

    def copy_referrers(self, layout: Path, ref: Reference) -> list[str]:
        """Put what is attached to an image beside it, and the index that finds it.

        Registries with the referrers API know the manifests by their subject; for all others the
        index stands under the tag that OCI 1.1 names for that. What others attached stays in it.

        Args:
            layout: An OCI layout with manifests that have a subject, and an index of them under
                the name ``sha256-<hex digits of the subject>``; checked before anything is sent.
            ref: The image, with its digest.

        Returns:
            The digests of the manifests.

        Raises:
            ForgeError: If the layout is damaged, or its subject is another image (exit code 1); if
                the registry does not answer or refuses (2).
        """
        tag = fallback_tag(ref.digest)
        index, images = read_referrers(layout, ref.digest)
        client = self._client(ref)
        for image in images:
            absent = [blob for blob in image.blobs[1:] if not self._has(client, blob)]
            doing = f"attaching {image.manifest.digest[:19]}…"
            self._send(layout, image, ref, doing, absent)
        data = self._joined(ref.at_tag(tag), index)
        self.put(ref.at_tag(tag), data, INDEX)
        return [image.manifest.digest for image in images]

    def copy_out(self, ref: Reference, layout: Path, seeds: Sequence[Path] = ()) -> Copied:
        """Take an image into a layout of its own; what a killed run left there is used.

        Args:
            ref: The image, with its digest.
            layout: A folder; it is there, whole, when this returns.
            seeds: Other layouts, whose blobs need not be taken again.

        Returns:
            What was taken.

        Raises:
            NotThereError: If there is no such image.
            ForgeError: If it is an index, or the registry gives other bytes (exit code 1), does
                not answer or refuses (2).
        """
        data, kind = self._manifest(ref)
        digest = _digest(data)
        wanted = _image(data, kind, ref, digest)
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        for stray in layout.glob("oci-put-blob*"):
            stray.unlink()
        for blob in wanted:
            _keep_or_seed(blob, layout, seeds)
        absent = [blob for blob in wanted if not blob.path(layout).is_file()]
        total = sum(blob.size for blob in absent)
        free = shutil.disk_usage(layout).free
        if total > free:
            raise ForgeError(
                f"the disk is full: {ref} needs {size(total)}, and {layout} has room for "
                f"{size(free)}",
                expected="room for the image",
                mend="free some space, or set TPUFORGE_OUT to a larger disk",
            )
        (layout / "index.json").unlink(missing_ok=True)
        doing = f"taking {digest[:19]}… from {ref.repository}"
        if absent and self._program():
            source = f"docker://{ref.at_digest(digest)}"
            self._copy(doing, ref, [source, "oci:."], layout, absent)
        else:
            with self.progress.step(doing, total) if absent else contextlib.nullcontext():
                for blob in absent:
                    path = blob.path(layout)
                    self.take(ref, blob, path.parent / f".{path.name}").replace(path)
            manifest = oci.Blob(digest, len(data), kind)
            write_atomic(manifest.path(layout), data)
            _write_index(layout, manifest)
        image = oci.read_image(layout)
        bad = oci.wrong(layout, image)
        if image.manifest.digest != digest or bad:
            for blob in bad:
                blob.path(layout).unlink(missing_ok=True)
            what = bad[0].digest if bad else image.manifest.digest
            raise ForgeError(
                f"{ref} did not arrive as it should: {what}",
                expected=digest,
                mend="run the same command again; if it stays, ask who runs the registry",
                exit_code=Exit.FAULT,
            )
        return Copied(digest, len(absent), total, len(wanted) - len(absent))

    def copy_referrers_out(self, ref: Reference, layout: Path) -> list[dict[str, str]]:
        """Take what is attached to an image, by the index under the tag that OCI 1.1 names.

        Args:
            ref: The image, with its digest.
            layout: A folder; an OCI layout in the form of :meth:`copy_referrers` afterwards, or
                gone if nothing is attached.

        Returns:
            ``digest`` and ``artifact_type`` of each.

        Raises:
            ForgeError: If something of it is attached to another image or has another digest (exit
                code 1); if the registry does not answer or refuses (2).
        """
        shutil.rmtree(layout, ignore_errors=True)
        tag = fallback_tag(ref.digest)
        try:
            index = self.manifest(ref.at_tag(tag))
        except NotThereError:
            return []
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True)

        def keep(data: bytes) -> None:
            write_atomic(blobs / _digest(data).removeprefix("sha256:"), data)

        try:
            with self.progress.step(f"taking what is attached to {ref.digest[:19]}…"):
                keep(index)
                for entry in attached(index):
                    data = self.manifest(ref.at_digest(oci.descriptor(entry).digest))
                    keep(data)
                    body = parse_json(data)
                    for one in (body["config"], *body["layers"]):
                        blob = oci.descriptor(one)
                        _judge_size(ref, blob)
                        self.take(ref, blob, blob.path(layout))
        except (ValueError, KeyError, TypeError) as error:
            raise ForgeError(
                f"{ref.at_tag(tag)} is not an index of what is attached: {error}",
                expected="manifests with a subject, and an index of them",
                mend="look at that tag",
                exit_code=Exit.FAULT,
            ) from error
        _write_index(layout, oci.Blob(_digest(index), len(index), INDEX), tag)
        _, images = read_referrers(layout, ref.digest)
        kinds = {
            e["digest"]: str(e.get("artifactType", "")) for e in json.loads(index)["manifests"]
        }
        found = [image.manifest.digest for image in images]
        return [{"digest": digest, "artifact_type": kinds[digest]} for digest in found]

    def _manifest(self, ref: Reference) -> tuple[bytes, str]:
        client = self._client(ref)
        return self._patiently(f"reading {ref}", lambda: client.manifest(ref.version))

    def _has(self, client: Client, blob: oci.Blob) -> bool:
        return self._patiently(
            f"asking for {blob.digest[:19]}…",
            lambda: client.has_blob(blob.digest),
        )

    def _client(self, ref: Reference) -> Client:
        if ref.repository not in self._clients:
            self._clients[ref.repository] = Client(ref.host, ref.name, self.access)
        return self._clients[ref.repository]

    def _patiently(self, doing: str, action: Callable[[], T]) -> T:
        """Try something again, at growing intervals, as long as another try may help."""
        attempt = 1
        while True:
            try:
                return action()
            except TransientError as error:
                if attempt >= self.tries:
                    raise ForgeError(
                        f"{doing}: {error}; given up after {attempt} attempts",
                        expected="a registry that answers",
                        mend="see whether it runs, can be reached and has room, then run the same "
                        "command again: what has arrived is not sent twice",
                    ) from error
                pause = min(2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
                attempt += 1
                self.progress.note(
                    f"{doing}: {error}; attempt {attempt} of {self.tries} in {pause:.0f} s"
                )
                time.sleep(pause)

    def _send(
        self,
        layout: Path,
        image: oci.Image,
        ref: Reference,
        doing: str,
        absent: Sequence[oci.Blob],
    ) -> None:
        """Copy one image of a layout to its digest in a repository."""
        at = ref.at_digest(image.manifest.digest)
        if self._program():
            with _alone(layout, image) as staged:
                blobs = [image.manifest, *absent]
                self._copy(doing, ref, ["oci:.", f"docker://{at}"], staged, blobs)
            return
        client = self._client(ref)
        with self.progress.step(doing, sum(blob.size for blob in absent)):
            for blob in absent:
                path, told = blob.path(layout), self.progress.advance
                send = functools.partial(client.put_blob, blob.digest, path, told)
                self._patiently(f"sending {blob.digest[:19]}…", send)
        self.put(at, image.manifest.path(layout).read_bytes(), image.manifest.media_type)

    def _copy(
        self,
        doing: str,
        ref: Reference,
        ends: Sequence[str],
        folder: Path,
        blobs: Sequence[oci.Blob],
    ) -> None:
        """Let skopeo copy one image, between a registry and the layout that is the folder."""
        skopeo = self._program()
        client = self._client(ref)
        side = "src" if ends[0].startswith("docker:") else "dest"
        total = sum(blob.size for blob in blobs)
        # it looks at a digest when all has come, and a registry may send without end
        largest = max(blob.size for blob in blobs) + _SLACK
        bounded = ["sh", "-c", 'ulimit -f "$0"; exec "$@"', str(largest // 512)]

        def once() -> None:
            with self._words(client, side) as (words, env):
                copy = [skopeo, *words[0], "copy", "--preserve-digests", *words[1], *ends]
                done = run(
                    [*bounded, *copy],
                    timeout=_COPY_S + total / _SLOWEST,
                    env=env,
                    cwd=folder,
                    check=False,
                    doing=doing,
                    on_line=self.progress.detail,
                )
            if done.code != 0:
                raise explain(done, ref, known=client.credentials is not None)

        with self.progress.step(f"{doing} ({size(total)})"):
            self._patiently(doing, once)

    @contextlib.contextmanager
    def _words(
        self, client: Client, side: str
    ) -> Iterator[tuple[tuple[list[str], list[str]], dict[str, str]]]:
        """What skopeo is told of how to reach a registry, and its environment."""
        words = [f"--{side}-tls-verify={'false' if client.plain else 'true'}"]
        known = client.credentials
        with scratch_dir() as folder:
            # what is taken is decided by digest: the machine's policy on signatures is not asked
            policy = folder / "policy.json"
            policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
            if known is None:
                words.append(f"--{side}-no-creds")
            else:
                file = known.file or _write_auth(folder, client)
                words.append(f"--{side}-authfile={file}")
            if self.access.ca is not None:
                certificates = folder / "certs"
                certificates.mkdir()
                shutil.copyfile(self.access.ca, certificates / "ca.crt")
                words.append(f"--{side}-cert-dir={certificates}")
            kept = ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
            env = clean_env(**{k: os.environ[k] for k in kept if k in os.environ})
            yield (["--policy", str(policy)], words), env

    def _program(self) -> str:
        """Where skopeo is; empty if it cannot be had, and images are copied without it."""
        if self._skopeo is None:
            self._skopeo = host.which("skopeo")
            if not self._skopeo and host.can_install():
                with contextlib.suppress(ForgeError):
                    host.apt_install(["skopeo"], self.progress)
                self._skopeo = host.which("skopeo")
            if not self._skopeo:
                self.progress.note("there is no skopeo here: blobs are copied one after the other")
        return self._skopeo

    def _joined(self, ref: Reference, index: bytes) -> bytes:
        """The index of what is attached: ours, and of the registry's what we do not know.

        A document of the same type and file name as one of ours is an earlier one of it, which the
        new one replaces: nobody signs it any more.
        """
        try:
            data, kind = self._manifest(ref)
        except NotThereError:
            return index
        ours = json.loads(index)
        known = {entry["digest"] for entry in ours["manifests"]}
        replaced = {_document(entry) for entry in ours["manifests"]} - {None}
        try:
            listed = attached(data) if kind == INDEX else []
            others = [
                entry
                for entry in listed
                if entry["digest"] not in known and _document(entry) not in replaced
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ForgeError(
                f"{ref} should be an index of what is attached to the image, and is not: {error}",
                expected="an OCI image index",
                mend="remove that tag, then run the same command again",
                exit_code=Exit.FAULT,
            ) from error
        if not others:
            return index
        self.progress.note(f"{ref}: {len(others)} attached by somebody else stay")
        ours["manifests"] += others
        return json.dumps(ours, sort_keys=True, separators=(",", ":")).encode()


def _document(entry: Mapping[str, Any]) -> tuple[str, str] | None:
    """Type and file name of an attached document, as the index tells them; None without."""
    name = (entry.get("annotations") or {}).get("org.opencontainers.image.title")
    return (str(entry.get("artifactType")), str(name)) if name else None


def attached(index: bytes) -> list[dict[str, Any]]:
    """The entries of an index of what is attached to an image.

    Args:
        index: The index, which a stranger may have written.

    Raises:
        ValueError: If it is no JSON, or has more than anybody would look at.
        KeyError: If it is no index.
        TypeError: If it is none.
    """
    listed = parse_json(index)["manifests"]
    if len(listed) > _MOST_ATTACHED:
        raise ValueError(f"it has {len(listed):,} entries, and {_MOST_ATTACHED} are looked at")
    return list(listed)


def _judge_size(ref: Reference, blob: oci.Blob) -> None:
    if blob.size > oci.DOCUMENT_BYTES:
        raise ForgeError(
            f"{ref.repository}: the document {blob.digest} has {size(blob.size)}",
            expected=f"at most {size(oci.DOCUMENT_BYTES)}",
            mend="do not trust it: ask who published the image",
            exit_code=Exit.FAULT,
        )


def fallback_tag(digest: str) -> str:
    """The tag that OCI 1.1 has for what is attached to an image.

    Args:
        digest: The image's, ``sha256:…``.
    """
    return digest.replace(":", "-")


def read_referrers(layout: Path, subject: str) -> tuple[bytes, list[oci.Image]]:
    """Read what is attached to an image from its layout; every blob is checked.

    Args:
        layout: The folder with ``index.json``.
        subject: The image's digest.

    Returns:
        The bytes of the index of the manifests, and the manifests with their blobs.

    Raises:
        ForgeError: If it is damaged, or a manifest's subject is another image; exit code 1.
    """
    try:
        listed = parse_json(read_regular(layout / "index.json", oci.DOCUMENT_BYTES))["manifests"]
        named = [
            e
            for e in listed
            if (e.get("annotations") or {}).get(_REF_NAME) == fallback_tag(subject)
        ]
        if len(named) != 1 or named[0]["mediaType"] != INDEX:
            raise _other(layout, subject, "it has no index for this image")
        index = _whole(layout, named[0])
        images = []
        for entry in parse_json(index)["manifests"]:
            body = parse_json(_whole(layout, entry))
            found = (body.get("subject") or {}).get("digest")
            if found != subject:
                raise _other(layout, subject, f"{entry['digest']} is attached to {found}")
            blobs = [oci.descriptor(one) for one in (body["config"], *body["layers"])]
            for one in (body["config"], *body["layers"]):
                _whole(layout, one)
            manifest = oci.descriptor(entry)
            images.append(oci.Image(manifest, blobs[0], tuple(blobs[1:]), {}, {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForgeError(
            f"the layout {layout} of what is attached to the image is not whole: "
            f"{type(error).__name__}: {error}",
            expected="manifests with a subject, and an index of them",
            mend=_ATTACHED,
            exit_code=Exit.FAULT,
        ) from error
    return index, images


def _whole(layout: Path, entry: dict[str, Any]) -> bytes:
    data = read_regular(oci.descriptor(entry).path(layout), oci.DOCUMENT_BYTES)
    if _digest(data) != entry["digest"]:
        raise ValueError(f"the blob {entry['digest']} has another digest")
    return data


def _other(layout: Path, subject: str, what: str) -> ForgeError:
    return ForgeError(
        f"{layout} is not what is attached to {subject}: {what}",
        expected="a bill of materials and provenance of this very image",
        mend=_ATTACHED,
        exit_code=Exit.FAULT,
    )


def _damaged(layout: Path, digest: str) -> ForgeError:
    return ForgeError(
        f"the layout {layout} is damaged: the blob {digest} is missing or has another digest; "
        "nothing was sent",
        expected="every blob of the digest that names it",
        mend="bake it again: ./forge bake --no-cache",
        exit_code=Exit.FAULT,
    )


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _write_auth(folder: Path, client: Client) -> Path:
    """A helper's credentials where skopeo can read them: in a folder of this user alone."""
    known = client.credentials
    assert known is not None  # noqa: S101 - only called with some
    entry = {"auth": known.basic, **({"identitytoken": known.identity} if known.identity else {})}
    path = folder / "auth.json"
    write_atomic(path, json.dumps({"auths": {client.host: entry}}), mode=0o600)
    return path


@contextlib.contextmanager
def _alone(layout: Path, image: oci.Image) -> Iterator[Path]:
    """A layout with this image only, for a skopeo that cannot choose one by its digest."""
    with scratch_dir() as folder:
        (folder / "blobs").symlink_to(layout.absolute() / "blobs")
        _write_index(folder, image.manifest)
        yield folder


def _write_index(layout: Path, manifest: oci.Blob, ref_name: str = "") -> None:
    """Make a folder of blobs the layout of one manifest or index."""
    entry: dict[str, Any] = {
        "mediaType": manifest.media_type,
        "digest": manifest.digest,
        "size": manifest.size,
    }
    if ref_name:
        entry["annotations"] = {_REF_NAME: ref_name}
    write_atomic(layout / "oci-layout", '{"imageLayoutVersion":"1.0.0"}')
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
    write_json(layout / "index.json", index)


def _image(data: bytes, kind: str, ref: Reference, digest: str) -> list[oci.Blob]:
    """The config and the layers of an image in a registry."""
    try:
        body = parse_json(data)
        if "manifests" in body:
            ours = [
                f"{ref.repository}@{entry['digest']}"
                for entry in body["manifests"]
                if (entry.get("platform") or {}).get("architecture") == "amd64"
            ]
            raise ForgeError(
                f"{ref} is an index of several images",
                expected="one image",
                mend=f"name one of them: {' or '.join(ours) or 'there is none for amd64'}",
            )
        entries = (body["config"], *body["layers"])
        if body["config"]["mediaType"] not in _CONFIGS:
            raise ValueError(f"it is an artifact of the type {body['config']['mediaType']!r}")
        if len(entries) - 1 > _MOST_LAYERS:
            raise ValueError(f"it has {len(entries) - 1:,} layers")
        found = [oci.descriptor(entry) for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ForgeError(
            f"{ref} ({digest}, {kind}) is not the manifest of an image: {type(error).__name__}: "
            f"{error}",
            expected="an OCI image manifest",
            mend="look at the reference",
            exit_code=Exit.FAULT,
        ) from error
    return list(dict.fromkeys(found))


def _keep_or_seed(blob: oci.Blob, layout: Path, seeds: Sequence[Path]) -> None:
    """Have a blob that is here already, checked; one that is damaged is taken away."""
    path = blob.path(layout)
    for candidate in (path, *(blob.path(seed) for seed in seeds)):
        if not candidate.is_file() or candidate.stat().st_size != blob.size:
            continue
        if f"sha256:{sha256_file(candidate)}" == blob.digest:
            if candidate != path:
                path.unlink(missing_ok=True)
                try:
                    path.hardlink_to(candidate)
                except OSError:
                    # some file systems have no hard links
                    shutil.copyfile(candidate, path)
            return
    path.unlink(missing_ok=True)


def explain(done: Completed, ref: Reference, *, known: bool) -> Exception:
    """What a failed copy stands for, from skopeo's own words.

    Args:
        done: The ended skopeo.
        ref: The image in the registry.
        known: Whether the registry was told who one is.

    Returns:
        :class:`TransientError` if another try may help, else a ``ForgeError``.
    """
    found = _FATAL.findall(done.output)
    why = found[-1].replace('\\"', '"') if found else done.tail or f"skopeo: exit code {done.code}"
    low = why.lower()
    if "x509:" in low or "certificate" in low:
        return distribution.untrusted(ref.host, why)
    if re.search(r"\b(507|413)\b|insufficient storage|quota|entity too large", low):
        return distribution.full(ref.host, why)
    if re.search(r"unauthorized|authentication required|denied|\b40[13]\b", low):
        return distribution.refused(ref.host, ref.name, why, known=known)
    if "file too large" in low:
        return distribution.too_much(str(ref))
    if "no space left on device" in low:
        return ForgeError(
            f"the disk is full: {why}",
            expected="room for the image",
            mend="free some space, then run the same command again: what has arrived is kept",
        )
    if re.search(r"manifest unknown|name unknown|blob unknown|\b404\b", low):
        return distribution.not_there(str(ref), why)
    if re.search(r"digest.*(match|mismatch|invalid)|corrupt|(match|mismatch|invalid).*digest", low):
        return ForgeError(
            f"{ref}: a digest is not what it should be: {why}",
            expected="the bytes that the digest names",
            mend="do not trust it: ask who runs the registry, and push the image again",
            exit_code=Exit.FAULT,
        )
    return TransientError(why)

"""The verbs of tpuforge as nox sessions. ``nox -l`` lists them; arguments follow ``--``.

Each session runs one module in ``.venv``, which ``./forge`` makes from the hash-locked tools, so a
nox from anywhere gives the same result.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
INTERRUPTED = 130

nox.options.default_venv_backend = "none"
# each verb names itself and how it ended; what is left to nox are its own warnings and errors
logging.getLogger("nox").setLevel(logging.WARNING)
nox.options.sessions = ["lock_check", "fetch_wheel", "bake", "smoke", "bench", "report"]


def settle() -> None:
    """Let what nox itself says about a session, and cannot print, not become the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


atexit.register(settle)


def call(argv: list[str]) -> int:
    """Run a verb to its own end; signals are handed on to it, so that it can clean up.

    It has a session of its own: Ctrl-C reaches it once, and nobody kills it while it removes what
    it started. Until it can be told, they are held back here, and in it until it can end by them.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    child = subprocess.Popen(argv, start_new_session=True)
    before = {n: signal.signal(n, lambda number, _: child.send_signal(number)) for n in numbers}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        return child.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        for number, handler in before.items():
            signal.signal(number, handler)


def run(session: nox.Session, module: str, *, if_it_fails: str = "") -> None:
    """Run a module of the locked environment; its exit code becomes nox's own.

    Args:
        session: The session, with its arguments.
        module: What it runs.
        if_it_fails: A module to run before nox ends with the exit code of the first.
    """
    own = ROOT / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    forge = [python, str(ROOT / "forge"), "--python-module"]
    code = call([*forge, module, *session.posargs])
    if code:
        if if_it_fails and code != INTERRUPTED and not session.posargs:
            call([*forge, if_it_fails])
        # nox turns every failure into 1, and pipelines tell "unhealthy" from "could not judge"
        sys.exit(code if code > 0 else 128 - code)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve the inputs in lock/ and write the locks."""
    run(session, "tpuforge.lock.resolve")


@nox.session
def lock_check(session: nox.Session) -> None:
    """Prove the locks fresh, complete and free of CUDA."""
    run(session, "tpuforge.lock.check")


@nox.session
def export(session: nox.Session) -> None:
    """Write a lock in the forms that other tools read: pylock.toml, constraints, SBOM."""
    run(session, "tpuforge.lock.export")


@nox.session
def fetch_wheel(session: nox.Session) -> None:
    """Fetch the wheels that the lock names, each by its digest."""
    run(session, "tpuforge.build.wheelhouse")


@nox.session
def build_wheel(session: nox.Session) -> None:
    """Build the TorchTPU wheel from source with Bazelisk."""
    run(session, "tpuforge.build.source")


@nox.session
def audit_wheel(session: nox.Session) -> None:
    """Judge wheels of torch_tpu and libtpu by rules, without installing them."""
    run(session, "tpuforge.build.audit")


@nox.session
def engine(session: nox.Session) -> None:
    """Find a usable Docker engine, or set up a private one."""
    run(session, "tpuforge.images.engine")


@nox.session
def base(session: nox.Session) -> None:
    """Make the Debian base of the images, or write its lock (--relock)."""
    run(session, "tpuforge.images.base")


@nox.session
def bake(session: nox.Session) -> None:
    """Bake an image from the fetched wheels, offline."""
    run(session, "tpuforge.images.bake")


@nox.session
def reproduce(session: nox.Session) -> None:
    """Bake again and again from nothing, and compare the digests."""
    run(session, "tpuforge.images.reproduce")


@nox.session
def images(session: nox.Session) -> None:
    """Show the set of images: what is baked here, and why the rest is not."""
    run(session, "tpuforge.images.catalogue")


@nox.session
def sbom(session: nox.Session) -> None:
    """Write an image's bill of materials and its provenance, to be attached to it."""
    run(session, "tpuforge.release.sbom")


@nox.session
def push(session: nox.Session) -> None:
    """Copy images to a registry by digest, with what is attached to them."""
    run(session, "tpuforge.images.push")


@nox.session
def pull(session: nox.Session) -> None:
    """Copy an image from a registry by digest."""
    run(session, "tpuforge.images.pull")


@nox.session
def sign(session: nox.Session) -> None:
    """Sign an image in a registry, and what is attached to it."""
    run(session, "tpuforge.release.sign")


@nox.session
def verify(session: nox.Session) -> None:
    """Verify an image: its signature, bill of materials and provenance."""
    run(session, "tpuforge.release.verify")


@nox.session
def scan(session: nox.Session) -> None:
    """Look for known vulnerabilities in an image."""
    run(session, "tpuforge.release.scan")


@nox.session
def measure(session: nox.Session) -> None:
    """Measure bakes, sizes and pulls beside those of a plain Dockerfile."""
    run(session, "tpuforge.images.measure")


@nox.session
def smoke(session: nox.Session) -> None:
    """Run the health suite inside an image."""
    run(session, "tpuforge.smoke.health", if_it_fails="tpuforge.release.report")


@nox.session
def operators(session: nox.Session) -> None:
    """Tell which operators of PyTorch an image runs on a TPU."""
    run(session, "tpuforge.smoke.operators")


@nox.session
def model(session: nox.Session) -> None:
    """Lower and compile a model of yours inside an image, with no TPU."""
    run(session, "tpuforge.smoke.model")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks inside an image."""
    run(session, "tpuforge.smoke.bench", if_it_fails="tpuforge.release.report")


@nox.session
def report(session: nox.Session) -> None:
    """Join what the verbs left behind into a page for each image, and print where it is."""
    run(session, "tpuforge.release.report")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, shell scripts and Dockerfiles."""
    run(session, "tpuforge.release.lint")


@nox.session
def tests(session: nox.Session) -> None:
    """Run this project's own tests: unit, engine and faults, or those that are named."""
    run(session, "tpuforge.release.tests")

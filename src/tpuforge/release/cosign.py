"""cosign: signing what is in a registry, and verifying signatures.

cosign reaches the registry as the rest of tpuforge does: with the same credentials, certificate
authority and choice of HTTP. Of the caller's environment it gets the password of the key, and what
it needs to prove an identity or to reach a key in a key service; nothing else.

Facts: cosign 2.5 (``sign``, ``verify``, ``public-key``). A signature stands under the tag
``sha256-<hex>.sig`` beside the image; it changes no manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuforge import host, mirrors
from tpuforge.console import Progress
from tpuforge.distribution import Client
from tpuforge.errors import Exit, ForgeError
from tpuforge.paths import scratch_dir, user_path, write_atomic
from tpuforge.process import Completed, clean_env, run
from tpuforge.registry import Reference, Registry

_SIGN_S = 300.0
_VERIFY_S = 120.0
# where an identity or a root of trust of one's own comes from (cosign help env)
_PASSED_ON = (
    "ACTIONS_ID_TOKEN_REQUEST_TOKEN",
    "ACTIONS_ID_TOKEN_REQUEST_URL",
    "COSIGN_PASSWORD",
    "SIGSTORE_CT_LOG_PUBLIC_KEY_FILE",
    "SIGSTORE_ID_TOKEN",
    "SIGSTORE_REKOR_PUBLIC_KEY",
    "SIGSTORE_ROOT_FILE",
    "TUF_ROOT",
)
# what a key in a key service is reached by, by the scheme of its name
_SERVICES = {
    "awskms": "AWS_",
    "azurekms": "AZURE_",
    "gcpkms": "GOOGLE_",
    "hashivault": "VAULT_",
    "k8s": "KUBE",
}
_UNSIGNED = ("no signatures found",)
_ELSEWHERE = "missing digest in claim"
_OTHERS = (
    "no matching signatures",
    "invalid signature when validating",
    "none of the expected identities matched",
    "crypto/rsa: verification error",
)
_REFUSED = ("unauthorized", "denied", "authentication required")
_SILENT = ("connection refused", "no such host", "i/o timeout", "deadline exceeded")


@dataclass(frozen=True)
class Signer:
    """Whose signature is asked for.

    Attributes:
        key: A key file, or a key in a key service such as ``awskms://…``; empty for an identity.
        identity: The identity in the certificate of a keyless signature.
        issuer: Who vouches for that identity.
        log: Whether a signature by key has to be in the transparency log too; one without a key
            always is.
    """

    key: str = ""
    identity: str = ""
    issuer: str = ""
    log: bool = False

    def __str__(self) -> str:
        return self.key or f"{self.identity} ({self.issuer})"


class NotSignedError(ForgeError):
    """There is no such signature: none at all, or by somebody else."""


def key_of(text: str) -> str:
    """A key as a person names it, made absolute; one of a key service stays as it is.

    Args:
        text: A path, or a name with a scheme.

    Raises:
        ForgeError: If there is no such file.
    """
    if "://" in text:
        return text
    path = user_path(text)
    if not path.is_file():
        raise ForgeError(
            f"{text!r}: there is no such key",
            expected="a key that cosign generate-key-pair made, or one of a key service",
            mend="cosign generate-key-pair",
        )
    return str(path)


def program(progress: Progress) -> str:
    """The path of cosign, installed from Debian where that can be done.

    Args:
        progress: Told what happens.

    Raises:
        ForgeError: If it is not there and cannot be installed.
    """
    found = host.which("cosign")
    if found:
        return found
    if host.can_install():
        release = mirrors.os_release()
        if release.get("ID") == "debian" and release.get("VERSION_ID") == "12":
            # it needs no newer C library than that of Debian 12
            host.take_from_next("cosign", ["cosign"], progress)
        host.apt_install(["cosign"], progress)
        found = host.which("cosign")
    if not found:
        raise ForgeError(
            "cosign, which makes and verifies signatures, is not on this machine",
            expected="cosign 2 on PATH",
            mend="install it: apt-get install cosign (Debian 13), brew install cosign, or a "
            "release of sigstore/cosign",
        )
    return found


@dataclass(frozen=True)
class Cosign:
    """cosign, and a repository that it works in.

    Attributes:
        registry: How registries are reached.
        ref: A reference into the repository.
        path: The program.
    """

    registry: Registry
    ref: Reference
    path: str

    def sign(self, digests: Sequence[str], signer: Signer) -> None:
        """Sign manifests.

        Args:
            digests: Theirs.
            signer: By whom: the private key; without one the identity is asked for.

        Raises:
            ForgeError: If it cannot be done.
        """
        words = ["sign", "--yes"]
        if signer.key:
            words += ["--key", signer.key, f"--tlog-upload={'true' if signer.log else 'false'}"]
        done = self._run(words, digests, signer, _SIGN_S)
        if done.code != 0:
            raise self._explain(done, "signing", signer)

    def verify(self, digest: str, signer: Signer, mend: str = "") -> None:
        """Verify that a manifest is signed.

        Args:
            digest: Its digest.
            signer: By whom: the public key, or the identity and its issuer.
            mend: What to do if nobody signed it.

        Raises:
            NotSignedError: If it is not, or by somebody else; exit code 1.
            ForgeError: If that cannot be found out.
        """
        words = ["verify"]
        if signer.key:
            words += ["--key", signer.key, f"--insecure-ignore-tlog={str(not signer.log).lower()}"]
        else:
            words += ["--certificate-identity", signer.identity]
            words += ["--certificate-oidc-issuer", signer.issuer]
        done = self._run(words, [digest], signer, _VERIFY_S)
        if done.code == 0:
            return
        low = done.output.lower()
        if any(mark in low for mark in _UNSIGNED):
            raise NotSignedError(
                f"{self.ref.repository}@{digest} is not signed",
                expected=f"a signature by {signer}",
                mend=mend or "do not use it",
                exit_code=Exit.FAULT,
            )
        silent = any(mark in low for mark in _SILENT)
        if _ELSEWHERE in low:
            raise NotSignedError(
                f"{self.ref.repository}@{digest} has a signature that is of another image",
                expected=f"a signature of it by {signer}",
                mend="do not use it: somebody put that signature there",
                exit_code=Exit.FAULT,
            )
        if not silent and any(mark in low for mark in _OTHERS):
            raise NotSignedError(
                f"{self.ref.repository}@{digest} is signed, and not by {signer}",
                expected=f"a signature by {signer}",
                mend="do not use it, unless you know whose it is and trust them: name their key",
                exit_code=Exit.FAULT,
            )
        raise self._explain(done, "verifying", signer)

    def public_key(self, signer: Signer, folder: Path) -> Signer:
        """The same signer as one who verifies knows it.

        Args:
            signer: With a private key.
            folder: Where the public key goes.

        Raises:
            ForgeError: If the key cannot be read, such as for a wrong password.
        """
        path = folder / "cosign.pub"
        words = [self.path, "public-key", "--key", signer.key, "--outfile", str(path)]
        done = run(words, timeout=_VERIFY_S, env=environment(signer, {}), check=False)
        if done.code != 0:
            raise self._explain(done, "reading the key for", signer)
        return Signer(key=str(path), log=signer.log)

    def _run(
        self, words: Sequence[str], digests: Sequence[str], signer: Signer, limit: float
    ) -> Completed:
        client = Client(self.ref.host, self.ref.name, self.registry.access)
        with _settings(client) as settings:
            reach = ["--allow-http-registry", "--allow-insecure-registry"] if client.plain else []
            if client.access.ca is not None:
                reach.append(f"--registry-cacert={client.access.ca}")
            images = [f"{self.ref.repository}@{digest}" for digest in digests]
            return run(
                [self.path, *words, *reach, *images],
                timeout=limit,
                env=environment(signer, settings),
                check=False,
                doing=f"cosign {words[0]}",
            )

    def _explain(self, done: Completed, doing: str, signer: Signer) -> ForgeError:
        low = done.output.lower()
        mend = "read what cosign says above"
        expected = "exit code 0"
        if "decrypt" in low or "reading key" in low or "inappropriate ioctl" in low:
            expected, mend = "the key's password", "set COSIGN_PASSWORD to the password of the key"
        elif " pem " in low:
            private = doing != "verifying"
            expected = f"a {'private' if private else 'public'} key of cosign"
            mend = f"name {'cosign.key' if private else 'cosign.pub'} of cosign generate-key-pair"
        elif any(mark in low for mark in _REFUSED):
            expected = f"the right to write to {self.ref.repository}"
            mend = f"docker login {self.ref.host}, or --authfile"
        elif any(mark in low for mark in _SILENT):
            expected, mend = "services that answer", "see whether it can be reached from here"
        elif not signer.key:
            expected = "an identity: a token of the job, or SIGSTORE_ID_TOKEN"
            mend = "run it in a job that has one, or sign with --key"
        return ForgeError(
            f"{doing} {self.ref.repository}: cosign ended with code {done.code}\n{done.tail}",
            expected=expected,
            mend=mend,
        )


@contextlib.contextmanager
def _settings(client: Client) -> Iterator[dict[str, str]]:
    """Credentials for this one registry, where cosign looks for them, for as long as it runs."""
    with scratch_dir() as folder:
        auths = {}
        known = client.credentials
        if known is not None:
            more = {"identitytoken": known.identity} if known.identity else {}
            auths[client.host] = {"auth": known.basic, **more}
        write_atomic(folder / "config.json", json.dumps({"auths": auths}), mode=0o600)
        yield {"DOCKER_CONFIG": str(folder)}


def environment(signer: Signer, settings: dict[str, str]) -> dict[str, str]:
    """The environment of cosign.

    Args:
        signer: Whose key or identity it works with.
        settings: More variables.
    """
    scheme, _, rest = signer.key.partition("://")
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    if scheme == "env" and rest in os.environ:
        passed[rest] = os.environ[rest]
    elif scheme in _SERVICES and rest:
        begin = _SERVICES[scheme]
        passed |= {name: value for name, value in os.environ.items() if name.startswith(begin)}
    return clean_env(**passed, **settings)

"""The source: fetched from a git repository of our own, or a folder; what is refused, and how."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from process_support import call
from tpuforge import pins as pins_module
from tpuforge.build import checkout
from tpuforge.build.checkout import Checkout, fetch, host_of, is_unchanged, local, prune
from tpuforge.errors import Exit, ForgeError

UPSTREAM = pins_module.load().upstream


def git(folder: Path, *words: str) -> str:
    env = checkout.environment() | {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (
            ("NAME", "a"),
            ("EMAIL", "a@example.org"),
            ("DATE", "2026-11-30T12:00:00Z"),
        )
    }
    command = ["git", "-C", str(folder), *words]
    return call(command, env=env, check=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a tag, an annotated tag and a branch."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "ci" / "wheel").mkdir(parents=True)
    (folder / "ci" / "wheel" / "BUILD").write_text("# the wheel\n")
    (folder / "MODULE.bazel").touch()
    (folder / ".bazelrc").write_text("try-import %workspace%/user.bazelrc\n")
    (folder / ".gitignore").write_text("user.bazelrc\nbazel-*\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    git(folder, "tag", "v0.2.0")
    git(folder, "tag", "-a", "v0.2.0rc1", "-m", "a candidate")
    (folder / "more").write_text("x")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "second")
    return folder


@pytest.fixture
def upstream(repository: Path, tmp_path: Path) -> Path:
    """A copy of that repository, for a test to change."""
    return Path(shutil.copytree(repository, tmp_path / "upstream-家", symlinks=True))


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    """A program that a checkout may name, and that must not be run."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'run'}'\ncat\n")
    path.chmod(0o755)
    yield path
    assert not (tmp_path / "run").exists()


def head(folder: Path, name: str = "HEAD") -> str:
    return git(folder, "rev-parse", f"{name}^{{commit}}").strip()


def test_the_pinned_ref(upstream: Path, tmp_path: Path) -> None:
    first = head(upstream, "v0.2.0")
    unsure = fetch(None, UPSTREAM, tmp_path / "sources", repository=str(upstream))
    assert unsure == Checkout(
        tmp_path / "sources" / first, first, False, "v0.2.0", str(upstream), False, 1796040000
    )
    assert "unverified: lock/pins.toml does not name it" in unsure.described
    assert not (unsure.path / "more").exists()
    # with the commit in the pins it is verified, and there is nothing to fetch
    sure = fetch(None, replace(UPSTREAM, commit=first), tmp_path / "sources", repository="/gone")
    assert sure.verified
    assert sure.described == f"v0.2.0, commit {first}, verified"
    assert [path.name for path in (tmp_path / "sources").iterdir()] == [first]


def test_a_tag_that_was_moved(upstream: Path, tmp_path: Path) -> None:
    pinned = replace(UPSTREAM, commit=head(upstream, "main"))
    with pytest.raises(ForgeError, match=r"v0\.2\.0 names commit") as caught:
        fetch(None, pinned, tmp_path / "sources", repository=str(upstream))
    assert caught.value.exit_code == Exit.FAULT
    assert f"{head(upstream, 'main')}, as lock/pins.toml says" in caught.value.expected
    assert not (tmp_path / "sources").exists()


def test_branch_annotated_tag_and_commit(upstream: Path, tmp_path: Path) -> None:
    sources, second = tmp_path / "sources", head(upstream)
    annotated = fetch("v0.2.0rc1", UPSTREAM, sources, repository=upstream.as_uri())
    assert annotated.commit == head(upstream, "v0.2.0")
    branch = fetch("main", UPSTREAM, sources, repository=upstream.as_uri())
    assert (branch.commit, branch.verified) == (second, False)
    shutil.rmtree(branch.path)
    named = fetch(second, UPSTREAM, sources, repository=upstream.as_uri())
    assert (named.commit, named.verified) == (second, True)
    assert (named.path / "more").read_text() == "x"


def test_what_the_repository_does_not_have(upstream: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    with pytest.raises(ForgeError, match=r"has no tag or branch v0\.2\.1") as caught:
        fetch("v0.2.1", UPSTREAM, sources, repository=str(upstream))
    assert "near are v0.2.0" in caught.value.expected
    with pytest.raises(ForgeError, match="has no commit " + "e" * 40):
        fetch("e" * 40, UPSTREAM, sources, repository=str(upstream))
    with pytest.raises(ForgeError, match="does not answer"):
        fetch(None, UPSTREAM, sources, repository="https://127.0.0.1:1/x")
    with pytest.raises(ForgeError, match="does not answer") as caught:
        # a transport that runs a program is not one
        fetch(None, UPSTREAM, sources, repository=f"ext::sh -c touch% {tmp_path}/run")
    assert "'ext' not allowed" in caught.value.found
    assert not (tmp_path / "run").exists()
    assert not list(sources.glob("*")) and not list(sources.glob(".*"))


def test_an_address_with_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="holds credentials") as caught:
        fetch(None, UPSTREAM, tmp_path, repository="https://me:hunter2@example.org/x")
    assert "hunter2" not in caught.value.found


def test_a_fetched_source_that_was_altered_is_fetched_again(upstream: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    first = head(upstream, "v0.2.0")
    made = fetch(first, UPSTREAM, sources, repository=str(upstream))
    for spoil in (
        lambda: (made.path / "MODULE.bazel").write_text("altered"),
        lambda: (made.path / "user.bazelrc").write_text("build --copt=-O0"),
        lambda: shutil.rmtree(made.path / ".git"),
    ):
        spoil()
        again = fetch(first, UPSTREAM, sources, repository=str(upstream))
        assert again == made
        assert (made.path / "MODULE.bazel").read_text() == ""
        assert not (made.path / "user.bazelrc").exists()


def test_what_bazel_wrote_into_a_fetched_source_is_put_right(
    upstream: Path, tmp_path: Path
) -> None:
    (upstream / "MODULE.bazel.lock").write_text("{}")
    git(upstream, "add", ".")
    git(upstream, "commit", "-q", "-m", "lock")
    made = fetch(head(upstream), UPSTREAM, tmp_path / "sources", repository=str(upstream))
    (made.path / "MODULE.bazel.lock").write_text("{1}")
    assert is_unchanged(made)
    # without the repository
    assert fetch(made.commit, UPSTREAM, tmp_path / "sources", repository="/gone").path == made.path
    assert (made.path / "MODULE.bazel.lock").read_text() == "{}"


def test_a_ref_without_the_target(upstream: Path, tmp_path: Path) -> None:
    git(upstream, "rm", "-q", "-r", "ci")
    git(upstream, "commit", "-q", "-m", "no wheel")
    with pytest.raises(ForgeError, match="is not a checkout of TorchTPU") as caught:
        fetch("main", UPSTREAM, tmp_path / "sources", repository=str(upstream))
    assert "//ci/wheel:torch_tpu_wheel" in caught.value.expected


def test_what_a_killed_fetch_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".git-abc" / "source").mkdir(parents=True)
    (tmp_path / "0").mkdir()
    prune(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_clean_folder(upstream: Path) -> None:
    git(upstream, "checkout", "-q", "v0.2.0")
    # what Bazel and the user left and git ignores does not make it dirty
    (upstream / "bazel-bin").mkdir()
    made = local(str(upstream), UPSTREAM)
    assert (made.commit, made.dirty, made.verified) == (head(upstream), False, False)
    assert made.epoch == 1796040000
    assert local(str(upstream), replace(UPSTREAM, commit=made.commit)).verified


def test_a_dirty_folder_is_refused_unless_asked(upstream: Path) -> None:
    for name in ("MODULE.bazel", "new file", "user.bazelrc"):
        (upstream / name).write_text("x")
    pinned = replace(UPSTREAM, commit=head(upstream))
    with pytest.raises(ForgeError, match="differs from its commit") as caught:
        local(str(upstream), pinned)
    assert " M MODULE.bazel, ?? new file, !! user.bazelrc" in caught.value.found
    assert "--allow-dirty" in caught.value.mend
    made = local(str(upstream), pinned, allow_dirty=True)
    assert made.dirty
    assert not made.verified
    assert len(made.tree_sha256 or "") == 64
    assert made.changes == (" M MODULE.bazel", "?? new file", "!! user.bazelrc")
    assert made.described == f"commit {made.commit} with 3 changes: unverified"


def test_a_folder_that_bazel_cannot_work_in(upstream: Path, tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="there is a space in it"):
        local(str(upstream.rename(tmp_path / "up stream")), UPSTREAM)


def test_a_folder_that_is_no_git_checkout(upstream: Path, tmp_path: Path) -> None:
    shutil.rmtree(upstream / ".git")
    # not even one inside another checkout
    git(tmp_path, "init", "-q")
    made = local(str(upstream), UPSTREAM)
    assert (made.commit, made.dirty, made.verified, made.epoch) == (None, False, False, None)
    assert "nothing says which source it is" in made.described


def test_a_source_that_is_changed_while_it_is_built(upstream: Path) -> None:
    looked_at = local(str(upstream), UPSTREAM)
    assert looked_at.tree_sha256 is None
    # Bazel leaves a record of its own there
    (upstream / "MODULE.bazel.lock").write_text("{}")
    assert is_unchanged(looked_at)
    assert local(str(upstream), UPSTREAM) == looked_at
    (upstream / "MODULE.bazel").write_text("x")
    assert not is_unchanged(looked_at)
    # a change on top of a change shows in the files alone
    dirty = local(str(upstream), UPSTREAM, allow_dirty=True)
    assert is_unchanged(dirty)
    (upstream / "MODULE.bazel").write_text("y")
    assert not is_unchanged(dirty)
    git(upstream, "commit", "-q", "-a", "-m", "third")
    assert not is_unchanged(looked_at)
    shutil.rmtree(upstream / ".git")
    plain = local(str(upstream), UPSTREAM)
    (upstream / "bazel-bin").symlink_to(upstream.parent)
    (upstream / "MODULE.bazel.lock").write_text("{1}")
    assert is_unchanged(plain)
    (upstream / "more").write_text("y")
    assert not is_unchanged(plain)


def test_a_program_in_a_checkouts_own_settings_is_not_run(
    upstream: Path, program: Path, tmp_path: Path
) -> None:
    git(upstream, "checkout", "-q", "v0.2.0")
    (upstream / ".git" / "hooks").mkdir(exist_ok=True)
    shutil.copy(program, upstream / ".git" / "hooks" / "post-checkout")
    git(upstream, "config", "core.fsmonitor", str(program))
    local(str(upstream), UPSTREAM)
    fetch("main", UPSTREAM, tmp_path / "sources", repository=str(upstream))


def test_gits_environment_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_DIR", "GIT_PROXY_COMMAND", "GIT_EXTERNAL_DIFF"):
        monkeypatch.setenv(name, "/poison")
    monkeypatch.setenv("SSL_CERT_FILE", "/my/bundle.pem")
    env = checkout.environment()
    assert "/poison" not in env.values()
    assert env["GIT_SSL_CAINFO"] == "/my/bundle.pem"
    assert env["GIT_CONFIG_GLOBAL"] == os.devnull


def test_the_host_of_an_address() -> None:
    assert host_of("https://example.org/x") == ("example.org", 443)
    assert host_of("ssh://git@example.org:2222/x") == ("example.org", 2222)
    assert host_of("git@example.org:x/y") == ("example.org", 22)
    assert host_of("file:///x") is None
    assert host_of("https://example.org:port/x") is None
    assert host_of("/x/y") is None


def _info(folder: Path, name: str, text: str) -> None:
    """A file of a checkout's own that stands in no commit."""
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / name).write_text(text)


def _replaced(folder: Path, program: Path) -> None:
    old = git(folder, "hash-object", "MODULE.bazel").strip()
    (folder / "MODULE.bazel").write_text("other")
    new = git(folder, "hash-object", "-w", "MODULE.bazel").strip()
    git(folder, "replace", old, new)


def _flagged(flag: str) -> Callable[[Path, Path], None]:
    def spoil(folder: Path, program: Path) -> None:
        git(folder, "update-index", flag, "MODULE.bazel")
        (folder / "MODULE.bazel").write_text("other")

    return spoil


def _hidden(folder: Path, program: Path) -> None:
    program.with_name("hide").write_text("evil.bzl\n")
    git(folder, "config", "core.excludesFile", str(program.with_name("hide")))
    (folder / "evil.bzl").touch()


def _excluded(folder: Path, program: Path) -> None:
    _info(folder, "exclude", "evil.bzl\n")
    (folder / "evil.bzl").touch()


def _modeless(folder: Path, program: Path) -> None:
    git(folder, "config", "core.fileMode", "false")
    (folder / "MODULE.bazel").chmod(0o755)


def _same_size(folder: Path, program: Path) -> None:
    for key, value in (("trustctime", "false"), ("checkStat", "minimal")):
        git(folder, "config", f"core.{key}", value)
    before = (folder / "more").stat()
    (folder / "more").write_text("y")
    os.utime(folder / "more", ns=(before.st_atime_ns, before.st_mtime_ns))


def _elsewhere(folder: Path, program: Path) -> None:
    shutil.copytree(folder, program.with_name("twin"), ignore=shutil.ignore_patterns(".git"))
    git(folder, "config", "core.worktree", str(program.with_name("twin")))
    (folder / "MODULE.bazel").write_text("other")


def _linked(folder: Path, program: Path) -> None:
    (folder / "ci").rename(program.with_name("ci"))
    (folder / "ci").symlink_to(program.with_name("ci"))


def _cleaned(folder: Path, program: Path) -> None:
    _info(folder, "attributes", "* filter=evil\n")
    git(folder, "config", "filter.evil.clean", str(program))
    (folder / "MODULE.bazel").write_text("other")


def _line_ends(folder: Path, program: Path) -> None:
    _info(folder, "attributes", "* text eol=crlf\n")
    (folder / ".gitignore").write_bytes(
        (folder / ".gitignore").read_bytes().replace(b"\n", b"\r\n")
    )


@pytest.mark.parametrize(
    "spoil",
    [
        *(_flagged("--assume-unchanged"), _flagged("--skip-worktree")),
        *(_replaced, _hidden, _excluded, _modeless, _same_size),
        *(_elsewhere, _linked, _cleaned, _line_ends),
    ],
)
def test_no_setting_of_a_checkout_hides_a_change(
    upstream: Path, program: Path, spoil: Callable[[Path, Path], None]
) -> None:
    git(upstream, "config", "log.showSignature", "true")
    git(upstream, "config", "gpg.program", str(program))
    spoil(upstream, program)
    with pytest.raises(ForgeError, match="differs from its commit"):
        local(str(upstream), UPSTREAM)


def test_a_signed_commit_is_read_without_gpg(upstream: Path, program: Path, tmp_path: Path) -> None:
    text = git(upstream, "cat-file", "commit", "HEAD")
    head_of, _, message = text.partition("\n\n")
    (tmp_path / "commit").write_text(f"{head_of}\ngpgsig -----BEGIN\n x\n\n{message}")
    signed = git(upstream, "hash-object", "-t", "commit", "-w", str(tmp_path / "commit")).strip()
    git(upstream, "reset", "-q", "--hard", signed)
    git(upstream, "config", "log.showSignature", "true")
    git(upstream, "config", "gpg.program", str(program))
    assert local(str(upstream), UPSTREAM).epoch == 1796040000


def test_what_a_commit_stands_for_is_no_change(upstream: Path, tmp_path: Path) -> None:
    large = b"large\n" * 9
    digest = hashlib.sha256(large).hexdigest()
    note = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(large)}\n"
    (upstream / "large").write_text(note)
    (upstream / ".gitattributes").write_text("large filter=lfs -text\n*.bat text eol=crlf\n")
    (upstream / "one.bat").write_text("a\nb\n")
    (upstream / "tab\tand \u00fc").symlink_to("MODULE.bazel")
    (upstream / "run").touch()
    (upstream / "run").chmod(0o755)
    git(upstream, "add", ".")
    git(upstream, "commit", "-q", "-m", "more")
    git(upstream, "config", "filter.lfs.clean", f"touch '{tmp_path / 'run'}'")
    (upstream / "large").write_bytes(large)
    (upstream / "one.bat").write_bytes(b"a\r\nb\r\n")
    assert not local(str(upstream), UPSTREAM).dirty
    assert not (tmp_path / "run").exists()
    (upstream / "large").write_bytes(large + b"x")
    assert local(str(upstream), UPSTREAM, allow_dirty=True).changes == (" M large",)


def test_a_fetched_source_that_learned_a_filter_is_fetched_again(
    upstream: Path, tmp_path: Path
) -> None:
    (upstream / "MODULE.bazel.lock").write_text("{}")
    git(upstream, "add", ".")
    git(upstream, "commit", "-q", "-m", "lock")
    made = fetch(head(upstream), UPSTREAM, tmp_path / "sources", repository=str(upstream))
    _info(made.path, "attributes", "* filter=evil\n")
    git(made.path, "config", "filter.evil.smudge", f"touch '{tmp_path / 'run'}'; cat")
    (made.path / "MODULE.bazel.lock").write_text("{1}")
    again = fetch(head(upstream), UPSTREAM, tmp_path / "sources", repository=str(upstream))
    assert (again.path / "MODULE.bazel.lock").read_text() == "{}"
    assert not (tmp_path / "run").exists()


def test_a_submodule_counts(upstream: Path, tmp_path: Path) -> None:
    shutil.copytree(upstream, tmp_path / "part")
    git(
        upstream,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "-q",
        str(tmp_path / "part"),
        "part",
    )
    git(upstream, "commit", "-q", "-m", "part")
    assert not local(str(upstream), UPSTREAM).dirty
    (upstream / "part" / "more").write_text("y")
    assert local(str(upstream), UPSTREAM, allow_dirty=True).changes == (" M part",)
    # one that was never fetched
    shutil.rmtree(upstream / "part")
    (upstream / "part").mkdir()
    assert not local(str(upstream), UPSTREAM).dirty


def test_names_of_any_bytes(upstream: Path) -> None:
    Path(os.fsdecode(os.fsencode(upstream) + b"/\xff.bzl")).touch()
    (upstream / "red\x1b[31m").touch()
    made = local(str(upstream), UPSTREAM, allow_dirty=True)
    assert made.changes == ("?? red\\x1b[31m", "?? \\udcff.bzl")

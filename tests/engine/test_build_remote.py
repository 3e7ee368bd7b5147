"""``build_wheel --remote cache=URL`` with a real Bazel and an HTTP cache on the loopback.

Real services (nginx, BuildGrid) are used by ``./forge tests remote``; see tests/remote.
"""

from __future__ import annotations

import pytest

from bazel_support import MODULE, WHEEL, arguments, get_bazel
from build_support import Checkout, free_port, make_checkout
from remote_support import FOR_OLD_BAZEL, build, clean, make_workspace, serve_cache
from tpuforge.build.normalise import normalise


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return make_checkout(tmp_path_factory.mktemp("remote") / "checkout")


def test_a_remote_cache_gives_the_same_wheel(checkout: Checkout) -> None:
    actions = make_workspace(checkout.root / "workspace", FOR_OLD_BAZEL)
    bazel = get_bazel(checkout.root)
    local = build(checkout, bazel)
    assert (local.cached, local.remote) == (0, 0)
    with serve_cache() as cache:
        first = build(checkout, bazel, "--remote", f"cache={cache.url}")
        assert first.cached == 0
        assert (cache.actions(cache.puts), cache.hits) == (actions, [])
        # packed at another moment, and the same once normalised
        assert first.made_sha256 != local.made_sha256
        assert first.sha256 == local.sha256

        # as if an earlier build had made other bytes
        wheel = checkout.out / "wheels" / WHEEL
        normalise(wheel, wheel, 0)
        uploaded = len(cache.puts)
        again = build(checkout, bazel, "--remote", f"cache={cache.url}")
        assert "not the bytes of the wheel that was here: " in again.said
        assert "time (1980, 1, 1, 0, 0, 0) and (" in again.said
        assert again.cached == actions
        assert cache.actions(cache.hits) == actions
        assert len(cache.puts) == uploaded
        assert (again.made_sha256, again.sha256) == (first.made_sha256, local.sha256)
        parameters = again.statement["predicate"]["buildDefinition"]["externalParameters"]
        assert parameters["remote"] == {"kind": "cache", "service": cache.url}

        cache.status = 401
        refused = build(checkout, bazel, "--remote", f"cache={cache.url}")
        assert (refused.cached, refused.sha256) == (0, local.sha256)
        assert "The remote cache was of no use: 401 Unauthorized." in refused.said

        # what it had is fetched when it is needed: a build that has begun cannot do without it
        cache.status, cache.left = 0, actions
        clean(checkout)
        words = [*arguments(checkout.root / "workspace", bazel), "--remote", f"cache={cache.url}"]
        died = checkout.run(*words, module=MODULE, timeout=120)
        assert died.returncode == 2
        assert "the remote cache or executor cannot be reached, or it failed" in died.stderr
    dead = f"http://127.0.0.1:{free_port()}"
    gone = checkout.run(*words[:-1], f"cache={dead}", module=MODULE, timeout=60)
    # the preflight tells it before Bazel runs
    assert gone.returncode == 2
    assert "127.0.0.1" in gone.stderr


def test_credentials_in_the_address_are_refused(checkout: Checkout) -> None:
    done = checkout.run(
        "--remote",
        "cache=http://me:hunter2-hunter2@127.0.0.1:1/",
        module=MODULE,
    )
    assert done.returncode == 2
    assert "holds credentials" in done.stderr
    written = [path.read_bytes() for path in checkout.out.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in text for text in [*written, done.stdout.encode()])
    assert "hunter2" not in done.stderr

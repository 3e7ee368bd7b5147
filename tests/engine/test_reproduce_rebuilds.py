"""Rebuilds of the real image from nothing."""

from __future__ import annotations

import json
import os

import pytest

from bake_support import Image, verb


@pytest.mark.slow
def test_bakes_from_nothing_agree(image: Image) -> None:
    """Other folder, times, umask, base, repository, locale, zone and user: one digest."""
    done = verb("tpuforge.images.reproduce", "--json", **image.engine.env)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(done.stdout)["data"]
    assert data["digests"] == [image.record["manifest_digest"]] * 3
    assert data["equal"] == 3
    assert data["finished"] == image.record["manifest_digest"]
    told = [set(one["differs_in"]) for one in data["rebuilds"]]
    assert "a base made anew" in told[1]
    assert any(what.startswith("a copy of the repository") for what in told[2])
    assert {"same user"} & told[2] or any(what.startswith("user ") for what in told[2])
    assert not (image.out / "reproduce" / image.slug).exists()
    assert os.path.lexists(image.layout)

"""Where wheels may come from: pip's settings, directories, indexes on disk and on the web."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_support import Index, make_wheel, plain_env, serve, sha256
from tpuforge.build import sources
from tpuforge.build.sources import Source, configured, is_release, offers, shown
from tpuforge.download import Access, Patience, Web
from tpuforge.errors import ForgeError

TORCH_INDEX = "https://torch.example/whl/cpu"
WEB = Web(Access(), Patience(pause_s=0.01))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("PIP_") or key.endswith("CA_BUNDLE")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", plain_env()["PIP_CONFIG_FILE"])


def labels(found: tuple[Source, ...]) -> list[tuple[str, str]]:
    return [(source.kind, source.label) for source in found]


def test_pip_says_where_and_torch_goes_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    monkeypatch.setenv("PIP_INDEX_URL", "https://main.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://extra.example/simple {tree.as_uri()}")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} https://links.example/page.html")
    found = configured([], TORCH_INDEX, offline=False)
    assert labels(found.for_version("1.0")) == [
        ("directory", str(tmp_path)),
        ("directory", str(tree)),
        ("index", "https://links.example/page.html"),
        ("index", "https://main.example/simple"),
        ("index", "https://extra.example/simple"),
    ]
    assert labels(found.for_version("2.13.0+cpu")) == [
        ("directory", str(tmp_path)),
        ("directory", str(tree)),
        ("torch index", TORCH_INDEX),
    ]


def test_what_is_shown_of_an_address() -> None:
    assert shown("https://me:pw@a.example/x.whl?X-Signature=1") == "https://***@a.example/x.whl"
    assert shown(Path("/a b/ü.whl")) == "/a b/ü.whl"


def test_offline_leaves_only_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://main.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = configured(["https://named.example/simple"], TORCH_INDEX, offline=True)
    assert labels(found.general) == labels(found.torch) == [("directory", str(tmp_path))]


def test_no_index_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    found = configured([], TORCH_INDEX, offline=False)
    assert found.general == found.torch == ()


def test_named_places_come_first_and_serve_torch_too(tmp_path: Path) -> None:
    found = configured(["https://named.example/simple", str(tmp_path)], TORCH_INDEX, offline=False)
    named = [("index", "https://named.example/simple"), ("directory", str(tmp_path))]
    assert labels(found.general)[:2] == named
    assert labels(found.torch) == [*named, ("torch index", TORCH_INDEX)]


def test_a_named_directory_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no such directory"):
        configured([str(tmp_path / "none")], TORCH_INDEX, offline=False)


def test_pips_files_count_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = https://me:secret@main.example/simple\nproxy = http://proxy:3128\n"
        "trusted-host = main.example\ncert = /etc/corporate.pem\n"
        "[download]\nno-index = no\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    found = configured([], TORCH_INDEX, offline=False)
    assert labels(found.general) == [("index", "https://***@main.example/simple")]
    assert found.general[0].place == "https://me:secret@main.example/simple"
    assert found.access.certificates == "/etc/corporate.pem"
    assert found.access.proxy == "http://proxy:3128"
    assert found.access.unverified_hosts == {"main.example"}


def test_settings_that_pip_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text("[global\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    with pytest.raises(ForgeError, match="asking pip for its settings"):
        configured([], TORCH_INDEX, offline=False)


@pytest.mark.parametrize(
    ("file", "same"),
    [
        ("Torch_TPU-0.2.0-cp311-cp311-manylinux_2_31_x86_64.whl", True),
        ("torch_tpu-0.2.0-1-cp311-cp311-any.whl", True),
        ("torch_tpu-0.2-py3-none-any.whl", True),
        ("torch_tpu-0.2.1-py3-none-any.whl", False),
        ("torch-0.2.0-py3-none-any.whl", False),
        ("torch_tpu-0.2.0.tar.gz", False),
        ("torch_tpu-0.2.0-py3-none-/../../x.whl", False),
        ("../torch_tpu-0.2.0-py3-none-any.whl", False),
    ],
)
def test_release_of_a_file_name(file: str, same: bool) -> None:
    assert is_release(file, "torch-tpu", "0.2.0") is same


def test_a_directory_offers_what_is_named_right(tmp_path: Path) -> None:
    right = make_wheel(tmp_path, "alpha", "1.0")
    make_wheel(tmp_path, "alpha", "2.0")
    make_wheel(tmp_path, "alphabet", "1.0")
    (tmp_path / "alpha-1.0-py3-none-linux_x86_64.whl").mkdir()
    found = offers(Source("directory", "directory", tmp_path), "alpha", "1.0", WEB)
    assert [(offer.place, offer.sha256) for offer in found] == [(right, None)]


def test_a_missing_directory_offers_nothing(tmp_path: Path) -> None:
    place = Source("directory", "directory", tmp_path / "gone")
    assert offers(place, "alpha", "1.0", WEB) == []


def test_an_index_on_disk(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "files", "alpha", "1.0")
    page = tmp_path / "simple" / "alpha" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{wheel.name}#sha256={sha256(wheel)}">x</a>')
    place = Source("directory", "index", tmp_path / "simple")
    (offer,) = offers(place, "alpha", "1.0", WEB)
    assert offer.place == wheel
    assert offer.sha256 == sha256(wheel)
    assert offers(place, "beta", "1.0", WEB) == []


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with serve(Index()) as running:
        running.add(make_wheel(tmp_path, "torch", "2.13.0+cpu", "cp311-cp311-linux_x86_64"))
        running.add(make_wheel(tmp_path, "torch", "2.13.0", "cp311-cp311-linux_x86_64"))
        yield running


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("digests", [False, True])
def test_an_index_on_the_web(index: Index, as_json: bool, digests: bool) -> None:
    index.as_json, index.digests = as_json, digests
    place = Source("index", "index", f"{index.simple}/")
    (offer,) = offers(place, "torch", "2.13.0+cpu", WEB)
    assert offer.file == "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    assert offer.place == f"{index.url}/files/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl"
    assert (offer.sha256 is not None) is digests


def test_a_page_of_links_on_the_web(index: Index) -> None:
    place = Source("index", "page", f"{index.simple}/torch/")
    assert len(offers(place, "torch", "2.13.0", WEB)) == 1


def test_a_page_from_the_web_does_not_name_local_files() -> None:
    page = sources.Page(
        "https://evil.example/simple/alpha/",
        "text/html",
        '<a href="file:///etc/alpha-1.0-py3-none-any.whl">x</a>',
    )
    assert sources._links(page) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"files": [{"url": "x"}]}'])
def test_a_page_that_is_not_what_it_says_offers_nothing(text: str) -> None:
    page = sources.Page("https://main.example/simple/alpha/", "application/json", text)
    assert sources._json(page) == []

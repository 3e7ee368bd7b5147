"""Fixtures of the health checks."""

from __future__ import annotations

import pytest

from smoke import chips, isolate, place

_METADATA_S = 5.0


@pytest.fixture(scope="session")
def here() -> place.Place:
    """The installation that is judged."""
    return place.here()


@pytest.fixture(scope="session")
def tpus() -> list[chips.Chip]:
    """TPU chips on the PCI bus, simulated ones included."""
    return chips.scan()


@pytest.fixture(scope="session")
def kind(tpus: list[chips.Chip]) -> str | None:
    """What the metadata server calls the slice; None without a TPU, or if none tells it at once."""
    if not tpus:
        return None
    found = isolate.run(chips.accelerator_type, timeout=_METADATA_S).value
    return None if found is None else str(found)


@pytest.fixture(scope="session")
def pypjrt() -> None:
    """What drives libtpu must be there, or nothing can be judged of it."""
    pytest.importorskip("pypjrt", reason="pypjrt, which drives libtpu, is not on PYTHONPATH")

"""Fixtures of the health checks."""

from __future__ import annotations

import pytest

from smoke import chips, place


@pytest.fixture(scope="session")
def here() -> place.Place:
    """The installation that is judged."""
    return place.here()


@pytest.fixture(scope="session")
def tpus() -> list[chips.Chip]:
    """TPU chips on the PCI bus, simulated ones included."""
    return chips.scan()

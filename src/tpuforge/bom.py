"""A bill of materials in the form of CycloneDX 1.6, valid by its official schema."""

from __future__ import annotations

from datetime import UTC, datetime

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tpuforge.errors import Exit, ForgeError


def written(bom: Bom, what: str, *, epoch: int, version: str | None, mend: str) -> str:
    """A bill as JSON, which says when it was made and by what.

    Args:
        bom: The bill, with its serial number: one that was drawn gives other bytes each time.
        what: What it is called in an error.
        epoch: Its time, seconds since 1970.
        version: The version of tpuforge, where the bill depends on it.
        mend: What to do if the schema refuses it.

    Raises:
        ForgeError: If the schema refuses it; exit code 1.
    """
    maker = Component(type=ComponentType.APPLICATION, name="tpuforge", version=version)
    bom.metadata.tools.components.add(maker)
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    text = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault is not None:
        place = "/".join(map(str, fault.data.absolute_path))
        raise ForgeError(
            f"{what} is no CycloneDX 1.6: {place}: {fault.data.message}",
            expected="a document that the official schema takes",
            mend=mend,
            exit_code=Exit.FAULT,
        )
    return text

"""Whether an account keeps deleted blobs, read from its own properties."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from tieringd.errors import StorageUnavailable


def soft_delete(document: bytes) -> tuple[str, ...]:
    """
    Return, for people, how deleted blobs are kept; nothing where they are not.

    *document* is the answer to Get Blob Service Properties.

    Raises:
        StorageUnavailable: It is none.
    """
    try:
        properties = ET.fromstring(document.removeprefix(b"\xef\xbb\xbf"))  # noqa: S314 - TLS and our service
        policy = properties.find("DeleteRetentionPolicy")
    except ET.ParseError as error:
        raise StorageUnavailable(f"the account's properties are no XML ({error})") from error
    if policy is None or policy.findtext("Enabled") != "true":
        return ()
    return (f"soft delete keeps deleted blobs for {policy.findtext('Days')} days",)

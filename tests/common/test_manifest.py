"""Manifests that fit, and words for those that do not."""

import pytest

from common.errors import ManifestMismatch
from common.manifest import manifest_differences, require_match
from common.pb.tandem.v1.worker_pb2 import Manifest
from tests.factories.rpc import make_manifest


def test_equal_manifests_fit() -> None:
    assert manifest_differences(make_manifest(), make_manifest()) == []
    require_match(make_manifest(), make_manifest(), peer="p")


@pytest.mark.parametrize(
    "name", [f.name for f in Manifest.DESCRIPTOR.fields if f.name not in ("wire_version_min", "wire_version_max")]
)
def test_every_field_but_the_wire_version_must_be_equal(name: str) -> None:
    """Taken from the message itself, so that a new field cannot be forgotten in the comparison."""
    ours = make_manifest()
    theirs = make_manifest()
    setattr(theirs, name, "other" if isinstance(getattr(ours, name), str) else 99)
    assert manifest_differences(ours, theirs) == [
        f"{name}: {getattr(ours, name)!r} here, {getattr(theirs, name)!r} there"
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "fit"),
    [
        ((1, 1), (1, 1), True),
        ((1, 2), (2, 3), True),
        ((2, 3), (1, 2), True),
        ((1, 1), (2, 3), False),
        ((4, 5), (1, 3), False),
    ],
)
def test_the_ranges_of_wire_versions_must_meet(ours: tuple[int, int], theirs: tuple[int, int], fit: bool) -> None:
    here = make_manifest(wire_version_min=ours[0], wire_version_max=ours[1])
    there = make_manifest(wire_version_min=theirs[0], wire_version_max=theirs[1])
    expected = [] if fit else [f"wire version: {ours[0]} to {ours[1]} here, {theirs[0]} to {theirs[1]} there"]
    assert manifest_differences(here, there) == expected


def test_the_error_names_the_peer_and_every_difference() -> None:
    with pytest.raises(ManifestMismatch) as caught:
        require_match(make_manifest(), make_manifest(model="b", head_dim=9), peer="p7")
    assert caught.value.message == "cannot pair with p7: model: 'tiny' here, 'b' there; head_dim: 8 here, 9 there"
    assert (caught.value.field, caught.value.status) == ("model", "FAILED_PRECONDITION")

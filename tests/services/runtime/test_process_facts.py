"""Metrics of a process itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headwater.services.runtime.certificate_end import certificate_end
from headwater.services.runtime.process_facts import ProcessFacts
from tests.own_certificate import own_certificate

DAY = 86_400


@pytest.mark.parametrize("days", [3, 30_000])
def test_the_end_of_a_certificate_is_read_from_its_file(tmp_path: Path, days: int) -> None:
    """A year past 2049 has another encoding."""
    cert, key = own_certificate(tmp_path, days=days)
    end = certificate_end(cert)
    assert end is not None
    assert end - time.time() == pytest.approx(days * DAY, abs=120)
    assert certificate_end(key) is None


@pytest.mark.parametrize("cut", [0, 1, 20, 200])
def test_a_file_that_holds_no_whole_certificate_has_no_end(tmp_path: Path, cut: int) -> None:
    (tmp_path / "cert.pem").write_text(
        f"-----BEGIN CERTIFICATE-----\n{'MIIC' * cut}\n-----END CERTIFICATE-----\n"
    )
    assert certificate_end(tmp_path / "cert.pem") is None
    assert certificate_end(tmp_path / "nothing.pem") is None


def test_disks_and_certificates_are_labelled_by_their_purpose(tmp_path: Path) -> None:
    cert, _ = own_certificate(tmp_path, days=5)
    facts = ProcessFacts(
        "gateway",
        disks={"state": tmp_path, "cached prefixes": None, "gone": tmp_path / "gone"},
        certificates={"stages": cert, "clients": ""},
    )
    reported = {
        (sample.name, sample.labels.get("what")): sample.value
        for family in facts.collect()
        for sample in family.samples
    }
    assert reported.keys() == {
        ("headwater_build_info", None),
        ("headwater_disk_free_bytes", "state"),
        ("headwater_disk_size_bytes", "state"),
        ("headwater_certificate_ends_timestamp_seconds", "stages"),
    }
    free = reported["headwater_disk_free_bytes", "state"]
    assert 0 < free <= reported["headwater_disk_size_bytes", "state"]

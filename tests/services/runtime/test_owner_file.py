"""Who may read what this account writes, and which files of keys are taken at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.gateway.tenancy.cache_namespace import CacheNamespaces
from headwater.gateway.tenancy.tenants import AdminKeys, KeyedTenants
from headwater.services.runtime.owner_file import open_log, own_folder, read_secrets
from headwater.services.runtime.settings import SettingError

SECRET = "ada a-secret-of-more-than-16-characters\n"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o777])
def test_a_file_of_keys_that_other_users_may_read_or_write_is_refused(
    tmp_path: Path, mode: int
) -> None:
    path = tmp_path / "keys"
    path.write_text(SECRET)
    path.chmod(mode)
    readers = {
        "--api-key-file": lambda: KeyedTenants.read(path),
        "--admin-key-file": lambda: AdminKeys.read("", str(path)),
        "--master-key-file": lambda: CacheNamespaces.read("", str(path), shared=False),
    }
    for flag, read in readers.items():
        with pytest.raises(
            SettingError,
            match=f"{flag} is .*; allowed: a file that no other user may read: chmod o= ",
        ):
            read()


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_file_of_keys_for_owner_and_group_is_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text(SECRET)
    path.chmod(mode)
    assert read_secrets("api_key_file", path) == SECRET


def test_state_is_for_its_owner_and_logs_for_the_group_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        state = tmp_path / "state"
        state.mkdir(mode=0o777)
        own_folder(state)
        own_folder(state / "logs")
        for append in (True, False):
            with open_log(state / "logs" / f"{append}.log", append=append) as log:
                log.write(b"x")
            assert (state / "logs" / f"{append}.log").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)
    assert {state.stat().st_mode & 0o777, (state / "logs").stat().st_mode & 0o777} == {0o700}

"""Memory behind addresses of a GPU, where its driver refuses a call."""

from __future__ import annotations

import pytest

from headwater.kernels.launch import device_memory
from headwater.kernels.launch.device_memory import DeviceMemory, DriverError


@pytest.mark.parametrize(
    ("refused", "undone"),
    [("cuMemMap", ["cuMemRelease"]), ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease"])],
)
def test_what_was_mapped_is_unmapped_where_a_later_call_fails(
    monkeypatch: pytest.MonkeyPatch, refused: str, undone: list[str]
) -> None:
    calls: list[str] = []

    def call(function: str, *_: object) -> None:
        calls.append(function)
        if function == refused:
            raise DriverError(function, 2)

    monkeypatch.setattr(device_memory, "_call", call)
    memory = DeviceMemory.__new__(DeviceMemory)
    memory.num_bytes = memory._address = 4096
    memory._handle = None
    memory._properties = device_memory._properties(0, 0)
    with pytest.raises(DriverError):
        memory.map()
    assert calls[calls.index(refused) + 1 :] == undone
    assert not memory.is_mapped

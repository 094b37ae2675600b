"""Rings and memory between a server and its core: both ends, until the core has inherited its
own."""

from __future__ import annotations

import os

from headwater.engine_core.system.ring import RingReader, RingWriter, create_ring

from .block_keys import offer_block_keys
from .mask_table import Int32Array, create_mask_memory, map_masks
from .messages import Ends, Ready
from .peer_records import UInt8Array, create_record_memory, map_records
from .variables import WEIGHTS_HOLDER_FD


class CoreMemory:
    def __init__(self) -> None:
        command_writer, self._command_reader = create_ring()
        self.report_writer, report_reader = create_ring()
        self._mask_report_writer, mask_report_reader = create_ring()
        self._masks = create_mask_memory()
        self._records = create_record_memory()
        self.commands = RingWriter(command_writer)
        self.reports = RingReader(report_reader)
        self._mask_reports = [RingReader(mask_report_reader)]

    def ends(self, lifeline: int) -> Ends:
        """Descriptors that the core inherits."""
        return Ends(
            commands=self._command_reader,
            reports=self.report_writer,
            mask_reports=self._mask_report_writer,
            masks=self._masks,
            records=self._records,
            block_keys=offer_block_keys(),
            lifeline=lifeline,
            weights_holder=int(os.environ.get(WEIGHTS_HOLDER_FD, "-1")),
        )

    def close_inherited(self, ends: Ends) -> None:
        """Closes the core's descriptors in this process, so that the core's death shows as end of
        file."""
        for end in (self._command_reader, self.report_writer, self._mask_report_writer):
            end.close()
        os.close(ends.block_keys)
        os.close(ends.lifeline)

    def map_masks(self, ready: Ready) -> Int32Array:
        """The table in which the core finds the masks of its rows, to be written."""
        return map_masks(self._masks, ready.max_draft_tokens + 1, ready.num_rows, ready.vocab_size)

    def map_records(self, ready: Ready) -> UInt8Array:
        """Blocks on their way from and to other engines."""
        return map_records(self._records, ready.num_peer_rows, ready.peer_row_bytes)

    def take_mask_reports(self) -> RingReader:
        """Returns the ring of steps that ask for masks or were drawn under them; to be called once.
        The caller closes it."""
        return self._mask_reports.pop()

    def close(self) -> None:
        """Closes all ends of the server except those of commands and reports."""
        for reader in self._mask_reports:
            reader.close()
        os.close(self._masks)
        os.close(self._records)

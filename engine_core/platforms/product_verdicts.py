"""Verdicts of earlier starts on this machine: whether the library computes a product with the bits
of our kernels. One file a product. Files are written atomically and unreadable ones count as
missing, so several engines may share a folder."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.kernels.gemm.product_probe import Product

log = logging.getLogger(__name__)
RowCounts = Mapping[Product, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ProductVerdicts:
    folder: Path
    facts: Mapping[str, str]
    """Facts about the device, its libraries and our kernels. Verdicts kept under other facts are
    not found."""

    def find(self, product: Product, row_counts: Sequence[int]) -> bool | None:
        """Whether the library's product differs; None: not known."""
        key = self._key(product, row_counts)
        try:
            kept = json.loads(self._path(key).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("the verdict on a product cannot be read, so it is probed again: %s", error)
            return None
        if (
            not isinstance(kept, dict)
            or kept.get("key") != key
            or not isinstance(kept.get("differs"), bool)
        ):
            log.warning(
                "the verdict on a product is not whole, so it is probed again: %s", self._path(key)
            )
            return None
        return bool(kept["differs"])

    def keep(self, product: Product, row_counts: Sequence[int], differs: bool) -> None:
        """Writes a verdict. If the folder cannot be written, the next engine probes again."""
        key = self._key(product, row_counts)
        path = self._path(key)
        new = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"key": key, "differs": differs}))
            new.replace(path)
        except OSError as error:
            log.warning("the verdict on a product cannot be kept: %s", error)

    def _key(self, product: Product, row_counts: Sequence[int]) -> dict[str, object]:
        n, k, dtype = product
        return {**self.facts, "product": [n, k], "dtype": str(dtype), "rows": list(row_counts)}

    def _path(self, key: Mapping[str, object]) -> Path:
        name = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
        return self.folder / f"{name}.json"


def own_products(
    row_counts: RowCounts, verdicts: ProductVerdicts, probe: Callable[[RowCounts], set[Product]]
) -> frozenset[Product]:
    """Products that the library computes with other bits. Probes products without a verdict, and
    logs the results."""
    begin = time.perf_counter()
    known = {product: verdicts.find(product, counts) for product, counts in row_counts.items()}
    unknown = {
        product: row_counts[product] for product, differs in known.items() if differs is None
    }
    found = probe(unknown) if unknown else set()
    for product, counts in unknown.items():
        verdicts.keep(product, counts, product in found)
    differing = frozenset(product for product, differs in known.items() if differs) | found
    seconds = time.perf_counter() - begin
    log.info("products: %d of %d shapes probed, %.2f s", len(unknown), len(row_counts), seconds)
    for n, k, dtype in sorted(differing, key=str):
        log.warning(
            "products: the library's bits differ for weights [%d, %d] of %s: our kernel takes them",
            n,
            k,
            dtype,
        )
    return differing

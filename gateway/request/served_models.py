"""The models and adapters that a gateway's requests may name."""

from __future__ import annotations

import dataclasses

from headwater.services.runtime import errors
from headwater.services.runtime.served_model import ServedModel, model_key

from ..adapters.names import AdapterNames, Target
from ..router.router import Router
from ..stages.processors import Processors
from ..tenancy.tenants import Tenant


class ServedModels:
    """Models of processors and engines, and the adapters on them."""

    def __init__(self, processors: Processors, router: Router, adapters: AdapterNames) -> None:
        self._processors = processors
        self._router = router
        self._adapters = adapters

    def model(self, name: str) -> ServedModel:
        """Model by name. Raises `NotFound`, `Unavailable` while no processor of a model that
        engines serve is known."""
        try:
            return self._processors.model(name)
        except errors.NotFound:
            if not self._router.has_replica(model_key(name)):
                raise
            raise errors.Unavailable(
                f"no processor of the model {name!r} is within reach", code="processor_unavailable"
            ) from None

    def target(self, tenant: Tenant, name: str) -> Target:
        """Model and adapter of a name that a tenant uses; an unknown name is its own target."""
        if self._processors.serves(name):
            return Target(name)
        return self._adapters.target(tenant, name)

    def of(self, tenant: Tenant) -> dict[str, tuple[ServedModel, int]]:
        """Models and adapters that a tenant may use, by name, each with the time since which it is
        served (seconds since 1970). An adapter is its base model under another name."""
        models = self._processors.models()
        adapters = {
            name: (dataclasses.replace(models[each.base][0], name=name), int(each.created_at))
            for name, each in self._adapters.seen_by(tenant).items()
            if each.base in models
        }
        return adapters | models

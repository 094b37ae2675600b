"""KEDA's and the Horizontal Pod Autoscaler's decisions, from the ScaledObjects that the chart
makes."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from urllib.parse import urlsplit

import httpx

from tests.deploy.chart import NAMESPACE, of_kind
from tests.deploy.kube_api import Object
from tests.deploy.local_cluster import LocalCluster


class Autoscaler:
    """Of one ScaledObject: it looks every polling interval."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._active_at = time.monotonic()
        self._wanted: deque[tuple[float, int]] = deque()
        self.num_starts = 0
        """From zero."""
        self.num_ends = 0
        """To zero."""

    @property
    def _spec(self) -> Object:
        spec: Object = of_kind(self._cluster.objects, "ScaledObject")[self._name]["spec"]
        return spec

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=5) as client:
            while True:
                if (value := await self._value(client)) is not None:
                    self.decide(value, time.monotonic())
                await asyncio.sleep(self._spec["pollingInterval"])

    async def _value(self, client: httpx.AsyncClient) -> float | None:
        """None where the gateways do not answer, or do not know: nothing is decided then."""
        (trigger,) = self._spec["triggers"]
        assert trigger["type"] == "metrics-api"
        url = urlsplit(trigger["metadata"]["url"])
        service, namespace, _ = (url.hostname or "").split(".")
        assert namespace == NAMESPACE
        if not self._cluster.endpoints(service):
            return None
        at = self._cluster.endpoint(service, url.port or 80)
        try:
            reply = await client.get(f"http://{at}{url.path}")
        except httpx.HTTPError:
            return None
        return (
            float(reply.json()[trigger["metadata"]["valueLocation"]]) if reply.is_success else None
        )

    def decide(self, value: float, now: float) -> None:
        spec = self._spec
        target = self._spec["scaleTargetRef"]["name"]
        metadata = spec["triggers"][0]["metadata"]
        current = self._cluster.replicas[target]
        is_active = value > float(metadata["activationTargetValue"])
        if is_active:
            self._active_at = now
        if current == 0:
            if is_active:
                self.num_starts += 1
                self._cluster.replicas[target] = max(1, spec["minReplicaCount"])
        elif not is_active and spec["minReplicaCount"] == 0:
            if now - self._active_at > spec["cooldownPeriod"]:
                self.num_ends += 1
                self._wanted.clear()
                self._cluster.replicas[target] = 0
        else:
            self._cluster.replicas[target] = self._stable(
                value / float(metadata["targetValue"]), now
            )

    def _stable(self, share: float, now: float) -> int:
        """At once up; down to the most that was wanted within the window."""
        spec = self._spec
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        wanted = min(max(math.ceil(share), spec["minReplicaCount"], 1), spec["maxReplicaCount"])
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - down["stabilizationWindowSeconds"]:
            self._wanted.popleft()
        return max(each for _, each in self._wanted)

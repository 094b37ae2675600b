"""What of Kubernetes decides about pods: deployments, stateful sets, jobs, endpoints, evictions.
Pods run here."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from headwater.services.runtime.tasks import owned_task
from tests.deploy.chart import of_kind
from tests.deploy.kube_api import Object
from tests.deploy.launcher import Launcher
from tests.deploy.local_pod import LocalPod

TICK_SECONDS = 0.05
PROPAGATION_SECONDS = 0.5
"""Seconds in which proxies still send to a pod that has begun to end."""
NODES = ("node-a", "node-b")
_SUBNETS = itertools.count()


class LocalCluster:
    """Brings what runs to what was applied, again and again."""

    def __init__(
        self, folder: Path, make_launcher: Callable[[Mapping[str, str]], Launcher]
    ) -> None:
        """`make_launcher` is given the addresses of services by their names, which are filled in
        later."""
        self.claims = folder / "claims"
        self.objects: list[Object] = []
        self.replicas: dict[str, int] = {}
        """Of deployments, as their objects say or an autoscaler has set."""
        self.pods: list[LocalPod] = []
        self.ended: list[LocalPod] = []
        self.cordoned: set[str] = set()
        self._folder = folder
        self._numbers = itertools.count(1)
        # Each pod has an address of its own on loopback, and so the ports that the chart gives it.
        self._subnet = f"127.{2 + os.getpid() % 250}.{next(_SUBNETS)}"
        self._hosts: dict[str, str] = {}
        self._launcher = make_launcher(self._hosts)
        self._lives: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[LocalCluster]:
        try:
            async with owned_task(self._reconcile()):
                yield self
        finally:
            for pod in self.pods:
                # Nobody waits for what runs.
                pod.spec = pod.spec | {"terminationGracePeriodSeconds": 1}
                pod.terminate()
            await asyncio.gather(*self._lives)
            self._launcher.close()

    def apply(self, objects: list[Object]) -> None:
        """As `kubectl apply`: the number of replicas stays where an object leaves it to an
        autoscaler."""
        self.objects = objects
        for name, each in of_kind(objects, "Deployment").items():
            if "replicas" in each["spec"]:
                self.replicas[name] = each["spec"]["replicas"]
            self.replicas.setdefault(name, 1)
        for name in of_kind(objects, "StatefulSet"):
            self._hosts.setdefault(name, self._new_address())

    def pods_of(self, owner: str) -> list[LocalPod]:
        return [pod for pod in self.pods if pod.owner == owner and not pod.is_terminating]

    def ready_pods(self, owner: str) -> list[LocalPod]:
        return [pod for pod in self.pods_of(owner) if pod.ready]

    def is_rolled_out(self) -> bool:
        """Every workload has its pods, of its newest template, ready, and no others."""
        for name, each in of_kind(self.objects, "Deployment").items():
            pods = [pod for pod in self.pods if pod.owner == name]
            want = self.replicas[name]
            if len(pods) != want or not all(
                pod.ready and pod.template == _version(each) for pod in pods
            ):
                return False
        return all(self.ready_pods(name) for name in of_kind(self.objects, "StatefulSet"))

    def endpoints(self, service: str) -> list[str]:
        """Addresses of the pods that a service sends to; those that end are among them a moment
        longer."""
        selector = of_kind(self.objects, "Service")[service]["spec"]["selector"].items()
        since = time.monotonic() - PROPAGATION_SECONDS
        return [
            pod.address
            for pod in self.pods
            if pod.ready
            and selector <= pod.labels.items()
            and (pod.terminating_since or since + 1) > since
        ]

    def endpoint(self, service: str, port: int) -> str:
        """One of them at random, with the port of a pod that the service's own stands for."""
        ports = of_kind(self.objects, "Service")[service]["spec"]["ports"]
        (target,) = [each["targetPort"] for each in ports if each["port"] == port]
        (container,) = next(
            pod.spec["containers"] for pod in self.pods if pod.address in self.endpoints(service)
        )
        (number,) = [each["containerPort"] for each in container["ports"] if each["name"] == target]
        return f"{random.choice(self.endpoints(service))}:{number}"

    async def drain_node(self, node: str) -> None:
        """As `kubectl drain`: no new pods there, and one after another evicted as budgets allow."""
        self.cordoned.add(node)
        while left := [pod for pod in self.pods if pod.node == node]:
            for pod in left:
                if not pod.is_terminating and self._may_evict(pod):
                    pod.terminate()
            await asyncio.sleep(TICK_SECONDS)

    def _may_evict(self, pod: LocalPod) -> bool:
        for budget in of_kind(self.objects, "PodDisruptionBudget").values():
            if budget["spec"]["selector"]["matchLabels"].items() <= pod.labels.items():
                healthy = len(self.ready_pods(pod.owner))
                return (
                    not pod.ready
                    or healthy > self.replicas[pod.owner] - budget["spec"]["maxUnavailable"]
                )
        return True

    async def _reconcile(self) -> None:
        while True:
            for each in self.objects:
                if each["kind"] == "Deployment":
                    self._deploy(each)
                elif each["kind"] == "StatefulSet":
                    self._keep_set(each)
                elif each["kind"] == "Job":
                    self._run_job(each)
            await asyncio.sleep(TICK_SECONDS)

    def _deploy(self, deployment: Object) -> None:
        name = deployment["metadata"]["name"]
        version = _version(deployment)
        want = self.replicas[name]
        rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        pods = self.pods_of(name)
        new = [pod for pod in pods if pod.template == version]
        old = [pod for pod in pods if pod.template != version]
        room = want + rolling["maxSurge"] - len(pods)
        for _ in range(min(want - len(new), room)):
            self._start(
                deployment, f"{name}-{version[:5]}-{next(self._numbers)}", self._new_address()
            )
        # Those that are not ready go first, as in Kubernetes.
        num_spare = sum(pod.ready for pod in pods) - (want - rolling["maxUnavailable"])
        for pod in sorted(old, key=lambda each: each.ready):
            if not pod.ready or num_spare > 0:
                num_spare -= pod.ready
                pod.terminate()
        for pod in sorted(new, key=lambda each: each.ready)[: max(0, len(new) - want)]:
            pod.terminate()

    def _keep_set(self, each: Object) -> None:
        name = each["metadata"]["name"]
        version = _version(each)
        pods = [pod for pod in self.pods if pod.owner == name]
        for pod in pods:
            if pod.template != version:
                pod.terminate()
        if not pods:
            self._start(each, f"{name}-0", self._hosts[name])

    def _run_job(self, job: Object) -> None:
        name = job["metadata"]["name"]
        if not any(pod.owner == name for pod in [*self.pods, *self.ended]):
            self._start(job, f"{name}-{next(self._numbers)}", self._new_address())

    def _start(self, workload: Object, name: str, address: str) -> None:
        template = workload["spec"]["template"]
        spec = workload["spec"]["template"]["spec"]
        claims = [
            {
                "name": each["metadata"]["name"],
                "persistentVolumeClaim": {"claimName": f"{each['metadata']['name']}-{name}"},
            }
            for each in workload["spec"].get("volumeClaimTemplates", [])
        ]
        pod = LocalPod(
            name=name,
            spec=spec | {"volumes": [*spec.get("volumes", []), *claims]},
            labels=template["metadata"]["labels"],
            address=address,
            node=self._least_busy_node(_version(workload)),
            launcher=self._launcher,
            secrets=of_kind(self.objects, "Secret"),
            folder=self._folder / "pods" / name,
            claims=self.claims,
            owner=workload["metadata"]["name"],
            template=_version(workload),
        )
        self.pods.append(pod)
        life = asyncio.create_task(self._live(pod))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)

    async def _live(self, pod: LocalPod) -> None:
        try:
            await pod.run()
        finally:
            self.pods.remove(pod)
            self.ended.append(pod)

    def _least_busy_node(self, template: str) -> str:
        """As topology spread wants it: of one version of a workload as many on each node."""
        free = [node for node in NODES if node not in self.cordoned]
        return min(
            free,
            key=lambda node: sum(pod.node == node for pod in self.pods if pod.template == template),
        )

    def _new_address(self) -> str:
        return f"{self._subnet}.{next(self._numbers)}"


def _version(workload: Object) -> str:
    return hashlib.sha256(
        json.dumps(workload["spec"]["template"], sort_keys=True).encode()
    ).hexdigest()

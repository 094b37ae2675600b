"""The engines of a line as administrators see them: listed, and one taken out of service while it
answers."""

from __future__ import annotations

import httpx

from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, engine_stage, started

KEY = {"authorization": "Bearer admin-key-of-the-house"}


def test_a_replica_is_drained_and_others_go_on(
    behind: Behind, start_gateway: GatewayStarter, nats_url: str
) -> None:
    engine = engine_stage(f"--nats-url={nats_url}", "--replica-id=leaving")
    with started(engine):
        seen = Behind(behind.processor, behind.output_processor, (*behind.replicas, engine.address))
        with start_gateway(
            seen, f"--nats-url={nats_url}", f"--admin-key={KEY['authorization'][7:]}"
        ) as gateway:

            def replicas() -> dict[str, str]:
                listed = gateway.client.get("/admin/replicas", headers=KEY).json()["data"]
                return {each["id"]: each["status"] for each in listed}

            def drain(name: str, headers: dict[str, str] = KEY, **body: object) -> httpx.Response:
                return gateway.client.post(
                    f"/admin/replicas/{name}/drain", json=body, headers=headers
                )

            gateway.wait_until(lambda: replicas().get("leaving") == "serving")
            assert drain("nobody").status_code == 404
            assert drain("leaving", limit_seconds=0).json()["error"]["param"] == "limit_seconds"
            assert drain("leaving", headers={}).status_code == 401
            reply = drain("leaving", limit_seconds=5)
            assert reply.status_code == 200, reply.text
            assert reply.json()["status"] == "drained"
            assert engine.process.wait(60) == 0
            gateway.wait_until(lambda: "leaving" not in replicas())
            assert replicas()
            records = gateway.client.get("/admin/audit", headers=KEY).json()["data"]
            assert [each["change"]["replica"] for each in records if each["action"] == "drain"] == [
                "leaving"
            ]

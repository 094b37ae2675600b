"""Room at the replicas of a model, by what they reported and what was sent to them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from headwater.services.runtime.queue_policy import DEFAULT, Policies, PolicyError

from .fleet import Fleet
from .peers import Peers


class Capacity:
    """Questions of admission. `peers` knows under which epoch replicas lend this gateway room."""

    def __init__(self, fleet: Fleet, peers: Peers, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._peers = peers
        self._clock = clock

    def num_in_flight(self, model_key: str) -> int:
        """Requests on their way or running, of all gateways that tell."""
        return sum(replica.load.num_requests for replica in self._fleet.of(model_key).values())

    def has_room(self, model_key: str, num_tokens: int, num_prompts: int) -> bool:
        """Replicas let this gateway have one more prompt waiting there: beside `num_tokens` that
        are on their way there, and `num_prompts` that were sent and have not started.

        A replica needs no more prompts waiting than it runs at once. Short prompts within its
        credit of tokens would be hundreds, sent in one burst that holds up everything else.
        """
        now = self._clock()
        room = float(-num_tokens)
        num_seats = 0
        is_served = False
        rates = self._fleet.rates(model_key, now)
        for replica in self._fleet.of(model_key).values():
            if replica.is_away:
                continue
            is_served = True
            num_seats += replica.load.reported.max_running or sys.maxsize
            credit = replica.load.reported.waiting_credits.get(self._peers.epoch)
            if credit is None:
                room = math.inf
            else:
                room += max(
                    0.0,
                    credit
                    - replica.load.sent_tokens(now, rates[replica.member.numerics_id].prefill_tps),
                )
            if room > 0 and num_prompts < num_seats:
                return True
        # If no replica accepts requests, the request is sent to one anyway, whose answer names the
        # reason.
        return not is_served

    def policies(self, model_key: str) -> Policies:
        """Order of a model's queue, as its replicas have it."""
        for replica in self._fleet.of(model_key).values():
            try:
                return Policies.of(replica.load.reported.policy)
            except PolicyError:
                # A later version of the engine has a policy that this gateway does not know.
                continue
        return Policies.of(DEFAULT)

    def prompt_seconds(self, model_key: str, num_tokens: int) -> float:
        """Seconds until replicas have computed this many prompt tokens after their waiting prompts;
        0 while no replica has reported its speed."""
        now = self._clock()
        rates = self._fleet.rates(model_key, now)
        speed = 0.0
        num_sent = 0.0
        for replica in self._fleet.of(model_key).values():
            if not replica.is_away and replica.load.reported.prefill_tps:
                tps = rates[replica.member.numerics_id].prefill_tps
                speed += tps
                num_sent += replica.load.drain_tokens(now, tps)
        return (num_sent + num_tokens) / speed if speed else 0.0

    def has_blocks(self, model_key: str, num_blocks: int) -> bool:
        """Whether a replica has room for this many KV blocks beside its running and sent requests.
        A replica without requests takes any number."""
        is_known = False
        for replica in self._fleet.of(model_key).values():
            if replica.is_away or not replica.load.reported.num_total_blocks:
                continue
            is_known = True
            num_used = replica.load.used_blocks()
            if not num_used or num_used + num_blocks <= replica.load.reported.num_total_blocks:
                return True
        return not is_known

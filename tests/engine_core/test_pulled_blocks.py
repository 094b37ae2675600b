"""Blocks between two engines that compute a model on a CPU: the same bits as computed, whoever
computed them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executors.simulated.swapper import SimulatedSwapper
from headwater.engine_core.kv import block_leases, peer_blocks
from headwater.engine_core.kv.block_record import HEADER_LEN, BlockSeal
from headwater.engine_core.kv.block_source import Outcome, Owner
from headwater.engine_core.kv.peer_blocks import HINT_SECONDS, PeerBlocks
from headwater.engine_core.kv.peer_link import Claim, PeerLink, Pulled, PullRequest, ToLink
from headwater.engine_core.request import Holder
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.direct_link import SEAL, DirectLink
from tests.engine_core.pulling_pair import PROMPT_BLOCKS, AtOnce, Pair
from tests.engine_core.small_models import Answer, SmallEngine, convert, random_checkpoint

RNG = np.random.default_rng(6)
PROMPTS = [RNG.integers(3, 512, 120).tolist() for _ in range(3)]
NUM_CACHED = 112
SAMPLING = SamplingParams(temperature=0.8, seed=3, max_tokens=10, num_logprobs=2)
SIZES = {"max_model_len": 256, "kv_peer_memory": 4 << 20}


def at(address: str) -> Holder:
    return Holder(address=address, epoch=1, num_tokens=120)


def same(answer: Answer, other: Answer) -> bool:
    return (answer.token_ids, answer.logprobs) == (other.token_ids, other.logprobs)


@pytest.fixture(
    scope="module", params=[pytest.param("float32", marks=pytest.mark.long), "bfloat16"]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp(request.param)
    random_checkpoint("qwen3", home / "hf")
    return convert(home / "hf", home / "ours", request.param)


@pytest.mark.parametrize("way", ["auto", "off"])
def test_pulled_blocks_have_the_bits_of_computed_ones(folder: Path, way: str) -> None:
    alone = SmallEngine(folder, max_model_len=256)
    known = [alone.answer([prompt], SAMPLING)[0] for prompt in PROMPTS]
    link = DirectLink()
    first, second = (
        SmallEngine(folder, link=link, address=each, kv_peer_direct=way, **SIZES) for each in "ab"
    )
    for prompt, expected in zip(PROMPTS, known, strict=True):
        [computed] = first.answer([prompt], SAMPLING)
        [pulled] = second.answer([prompt], SAMPLING, holder=at("a"))
        assert same(computed, expected)
        assert same(pulled, expected)
        assert (computed.cached_tokens, pulled.cached_tokens) == (0, NUM_CACHED)
    assert second.engine.load().hits_by_tier == {"peer": 3 * NUM_CACHED}
    pulls = second.engine.load().peers
    assert pulls is not None
    assert pulls.num_direct == (pulls.num_pulled if way == "auto" else 0)
    load = first.engine.load()
    assert load.peers is not None
    assert (load.peers.num_lent, load.peers.num_leases, load.num_used_blocks) == (
        3 * NUM_CACHED,
        0,
        0,
    )
    for engine in (first, second):
        engine.close()


def test_blocks_that_left_the_cache_are_lent_from_the_disk(folder: Path, tmp_path: Path) -> None:
    alone = SmallEngine(folder, max_model_len=256)
    known = [alone.answer([prompt], SAMPLING)[0] for prompt in PROMPTS]
    link = DirectLink()
    first = SmallEngine(
        folder, link=link, address="a", num_blocks=18, kv_disk_dir=tmp_path / "kv", **SIZES
    )
    second = SmallEngine(folder, link=link, address="b", **SIZES)
    for prompt in PROMPTS:
        first.answer([prompt], SAMPLING)
        first.settle()
    for prompt, expected in zip(PROMPTS, known, strict=True):
        [pulled] = second.answer([prompt], SAMPLING, holder=at("a"))
        assert same(pulled, expected)
        assert pulled.cached_tokens == NUM_CACHED
    load = first.engine.load()
    assert load.peers is not None
    # The cache of 17 blocks has the last prompt and a part of the one before.
    assert load.peers.num_lent == 3 * NUM_CACHED
    assert load.peers.num_lent_from_tiers >= NUM_CACHED
    assert (load.peers.num_leases, load.num_used_blocks) == (0, 0)
    for engine in (first, second):
        engine.close()


def test_an_engine_of_another_layout_lends_nothing(folder: Path) -> None:
    link = DirectLink()
    first = SmallEngine(folder, link=link, address="a", block_size=32, **SIZES)
    second = SmallEngine(folder, link=link, address="b", **SIZES)
    [known] = first.answer([PROMPTS[0]], SAMPLING)
    [answer] = second.answer([PROMPTS[0]], SAMPLING, holder=at("a"))
    assert same(answer, known)
    assert answer.cached_tokens == 0
    for engine in (first, second):
        engine.close()


@pytest.mark.parametrize("num_keys", [0, 1], ids=["no secret", "another secret"])
def test_records_of_an_engine_without_the_clusters_secret_are_not_used(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    rogue = BlockSeal([b"r" * 32] * num_keys)
    monkeypatch.setattr(peer_blocks, "ThreadLane", AtOnce)
    monkeypatch.setattr(block_leases, "ThreadLane", AtOnce)
    pair = Pair(seals=(rogue, SEAL))
    pair.add(pair.a, 1)
    pair.until(lambda: 1 in pair.ended)
    pair.add(pair.b, 2, holder="a")
    pair.until(lambda: 2 in pair.ended)
    assert pair.tokens[2] == pair.tokens[1]
    peers = pair.b.load().peers
    assert peers is not None
    assert (peers.num_pulled, peers.num_discarded) == (0, PROMPT_BLOCKS)


def test_a_hint_that_no_request_used_expires() -> None:
    """The engine had these blocks itself. When it has evicted them, the other engine may be
    gone."""
    now = 0.0
    hashes = [b"1" * 16, b"2" * 16]
    owner = Owner(b"n" * 16)
    swapper = SimulatedSwapper(np.zeros((4, 16), np.uint64), 4, late_polls=0)
    link = PeerLink(
        key=b"k" * 16,
        seal=BlockSeal(),
        records=np.zeros((8, HEADER_LEN + 128), np.uint8),
        send=lambda _: None,
    )
    peers = PeerBlocks(swapper, link, 4, clock=lambda: now)
    peers.expect(hashes, owner, at("a"))
    assert peers.find(hashes) == 2
    now += HINT_SECONDS
    assert peers.find(hashes) == 0
    peers.expect(hashes, owner, at("a"))
    assert peers.find(hashes) == 2


def test_a_load_names_the_block_before_its_first_one() -> None:
    hashes = [bytes([number]) * 16 for number in range(1, 5)]
    asked = list[ToLink]()
    swapper = SimulatedSwapper(np.zeros((4, 16), np.uint64), 4, late_polls=0)
    link = PeerLink(
        key=b"k" * 16,
        seal=BlockSeal(),
        records=np.zeros((8, HEADER_LEN + 128), np.uint8),
        send=asked.append,
    )
    peers = PeerBlocks(swapper, link, 4)
    peers.expect(hashes, Owner(b"n" * 16), at("a"))
    # Another prompt begins in the same way, and is thought to be elsewhere.
    peers.expect(hashes[:1], Owner(b"n" * 16), at("b"))
    assert (peers.find(hashes), peers.find(hashes[1:])) == (1, 3)
    peers.load(hashes[2:], [1, 2])
    peers.launch()
    [request] = asked
    assert isinstance(request, PullRequest)
    assert (request.wanted.parent, request.wanted.hashes, request.holder) == (
        hashes[1],
        hashes[2:],
        at("a"),
    )


@pytest.mark.parametrize("is_early", [False, True], ids=["of a request", "early"])
def test_blocks_of_a_load_that_was_given_up_do_not_count_as_discarded(is_early: bool) -> None:
    hashes = [b"1" * 16, b"2" * 16]
    asked = list[ToLink]()
    owner = Owner(b"n" * 16)
    swapper = SimulatedSwapper(np.zeros((4, 16), np.uint64), 4, late_polls=0)
    link = PeerLink(
        key=b"k" * 16,
        seal=BlockSeal(),
        records=np.zeros((8, HEADER_LEN + 128), np.uint8),
        send=asked.append,
    )
    peers = PeerBlocks(swapper, link, 4)
    peers.expect(hashes, owner, at("a"))
    ticket = (
        peers.load_early(hashes, [1, 2], owner, at("a"), b"")
        if is_early
        else peers.load(hashes, [1, 2])
    )
    peers.launch()
    [request] = asked
    assert isinstance(request, PullRequest)
    peers.cancel(ticket)
    assert [end.outcome for end in peers.poll()] == [Outcome.CANCELLED]
    peers.pulled(Pulled(pull=request.pull, before=Claim(), after=Claim()))
    assert peers.poll() == []
    assert (peers.num_discarded, len(peers._loads._free_slots)) == (0, 4)


def test_less_than_two_blocks_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"kv_peer_memory is 100; allowed: 0, or \d+ bytes .2 blocks, twice. and more",
    ):
        SmallEngine(folder, kv_peer_memory=100)

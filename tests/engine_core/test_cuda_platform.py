from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.linear.kinds import load_weights
from headwater.engine_core.layers.linear.linear import Linear, Product
from headwater.engine_core.layers.norm import WidthNorm
from headwater.engine_core.layers.process_group import Alone
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.platforms.cpu import CpuPlatform
from headwater.engine_core.platforms.cuda import CudaPlatform
from headwater.engine_core.weights.dummy import dummy
from headwater.engine_core.weights.model_config import ModelConfig

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 64
MAX_LEN = 2048
NUM_BLOCKS = 200


def model_config(architecture: str) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


class PlainCpu(CpuPlatform):
    """Any machine's CPU, whether or not its library's products are stable by row."""

    def linear(self, linear: Linear) -> Product:
        return linear.product


class Line:
    """A decoder on the GPU, its cache, and sequences whose tokens and blocks are fixed."""

    def __init__(
        self,
        architecture: str,
        num_seqs: int,
        shared_blocks: int = 0,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        # Imported here: it initialises CUDA libraries, which a machine without a GPU has not.
        from headwater.engine_core.platforms.cuda import CudaPlatform  # noqa: PLC0415

        config = model_config(architecture)
        self.config = config
        cuda = torch.device("cuda")
        layout = Decoder.layout(config)
        self.tensors = dummy(layout, torch.bfloat16, torch.device("cpu"))
        on_device = {name: tensor.to(cuda) for name, tensor in self.tensors.items()}
        platform = CudaPlatform(
            config, BLOCK_SIZE, max_decodes=64, max_model_len=MAX_LEN, device=cuda
        )
        self.decoder = Decoder(
            config, load_weights(layout, on_device, torch.bfloat16), platform, MAX_LEN
        )
        self.shape = (
            config.num_layers,
            2,
            NUM_BLOCKS,
            config.num_kv_heads,
            BLOCK_SIZE,
            config.head_dim,
        )
        self.cache = torch.zeros(self.shape, dtype=kv_dtype, device=cuda)
        self.tokens = torch.randint(1000, (num_seqs, MAX_LEN))
        self.tokens[:, : shared_blocks * BLOCK_SIZE] = self.tokens[0, : shared_blocks * BLOCK_SIZE]
        per_seq = (NUM_BLOCKS - 1 - shared_blocks) // num_seqs
        ids = torch.randperm(NUM_BLOCKS - 1)[: shared_blocks + per_seq * num_seqs].int() + 1
        own = ids[shared_blocks:].view(num_seqs, per_seq)
        self.table = torch.cat((ids[:shared_blocks].expand(num_seqs, -1), own), dim=1).contiguous()

    def batch(self, rows: list[int], starts: list[int], counts: list[int]) -> ForwardBatch:
        spans = [
            (row, torch.arange(s, s + c)) for row, s, c in zip(rows, starts, counts, strict=True)
        ]
        return ForwardBatch(
            token_ids=torch.cat([self.tokens[row, span] for row, span in spans]),
            positions=torch.cat([span for _, span in spans]),
            slots=torch.cat(
                [
                    self.table[row, span // BLOCK_SIZE].long() * BLOCK_SIZE + span % BLOCK_SIZE
                    for row, span in spans
                ]
            ),
            starts=np.array(starts, np.int32),
            counts=np.array(counts, np.int32),
            block_tables=self.table[rows],
            sampled=torch.tensor(counts).cumsum(0) - 1,
        )

    def forward(self, rows: list[int], starts: list[int], counts: list[int]) -> list[torch.Tensor]:
        """Hidden states of each row's tokens; of the last ones the same when nobody looks at
        others."""
        batch = self.batch(rows, starts, counts)
        moved = {
            name: getattr(batch, name).cuda()
            for name in ("token_ids", "positions", "slots", "block_tables", "sampled")
        }
        batch = replace(batch, **moved)
        hidden = self.decoder.forward(batch, self.cache)
        is_looked_at = np.array(counts) % 5 != 0
        ends = self.decoder.forward(
            batch, self.cache, ends=self.decoder.ends(batch, is_looked_at.astype(np.int32))
        )
        assert torch.equal(ends, hidden[batch.sampled[torch.from_numpy(is_looked_at).cuda()]])
        return list(hidden.split(counts))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@torch.inference_mode()
def test_the_gpu_computes_what_the_cpu_computes(architecture: str) -> None:
    line = Line(architecture, 3)
    rows = [0, 1, 2]
    counts = [1, 200, 70]
    on_gpu = torch.cat(line.forward(rows, [0, 0, 0], counts)).cpu().double()
    wide = {name: tensor.float() for name, tensor in line.tensors.items()}
    weights = load_weights(Decoder.layout(line.config), wide, torch.float32)
    decoder = Decoder(line.config, weights, PlainCpu(line.config, BLOCK_SIZE), MAX_LEN)
    on_cpu = decoder.forward(line.batch(rows, [0, 0, 0], counts), torch.zeros(line.shape)).double()
    assert ((on_gpu - on_cpu).norm() / on_cpu.norm()).item() < 2e-2


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@torch.inference_mode()
def test_bits_do_not_depend_on_batch_chunks_or_decode(kv_dtype: torch.dtype) -> None:
    line = Line("Qwen3ForCausalLM", 3, kv_dtype=kv_dtype)
    whole = line.forward([0], [0], [1100])[0]
    pieces = []
    for start, count in ((0, 7), (7, 500), (507, 513), (1020, 61), (1081, 9)):
        # Beside another sequence's chunk and a decode row, in ever other shapes.
        together = line.forward([1, 2, 0], [start, start, start], [1, 3 * count % 77 + 2, count])
        pieces.append(together[2])
    pieces += [line.forward([0], [position], [1])[0] for position in range(1090, 1100)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@torch.inference_mode()
def test_decoding_with_a_shared_prefix_gives_the_bits_of_decoding_alone(
    kv_dtype: torch.dtype,
) -> None:
    line = Line("Qwen3ForCausalLM", 20, shared_blocks=17, kv_dtype=kv_dtype)
    length = 17 * BLOCK_SIZE
    line.forward([0], [0], [length])
    for row in range(20):
        line.forward([row], [length], [row + 1])
    rows = list(range(20))
    before = line.cache.clone()
    together = line.forward(rows, [length + row + 1 for row in rows], [1] * 20)
    line.cache.copy_(before)
    for row in rows:
        assert torch.equal(line.forward([row], [length + row + 1], [1])[0], together[row])


def test_a_norm_over_all_heads_gives_a_row_the_same_bits_alone() -> None:
    sizes = {"max_decodes": 8, "max_model_len": MAX_LEN, "device": torch.device("cuda")}
    platform = CudaPlatform(model_config("Qwen3ForCausalLM"), BLOCK_SIZE, **sizes)
    norm = WidthNorm(platform, torch.ones(2048, device="cuda"), 1e-6, Alone())
    x = torch.randn(700, 2048, device="cuda")
    together = norm(x)
    for count in (1, 3, 64):
        assert torch.equal(norm(x[:count]), together[:count])

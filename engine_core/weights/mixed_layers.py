"""Shapes of models with two kinds of layers: with a window, and with full attention. Sources: Gemma
4; MiMo V2 Flash."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLayers:
    """Shapes that differ from those of the model's config, which are the shapes of layers with a
    window and with keys of their own."""

    global_head_dim: int
    """Size of a head in layers that see all keys."""
    global_kv_heads: int
    """Key heads of layers that see all keys."""
    has_global_sinks: bool = True
    """Whether layers that see all keys have sinks, in a model whose other layers have them."""
    reuses_keys: bool = False
    """Whether one projection makes keys and values in layers that see all keys."""
    num_sharing: int = 0
    """Number of last layers that read the keys and values of an earlier layer of their kind."""
    sharing_width: int = 0
    """Intermediate size of the MLPs of those layers."""
    input_size: int = 0
    """Size of the vector that each layer has for a token; 0: layers have none."""
    num_inputs: int = 0
    """Rows of the table of these vectors, one for each token id."""

    def divided(self, num_ranks: int) -> MixedLayers:
        """The shapes of one rank's layers."""
        return replace(
            self,
            global_kv_heads=self.global_kv_heads // num_ranks,
            sharing_width=self.sharing_width // num_ranks,
        )

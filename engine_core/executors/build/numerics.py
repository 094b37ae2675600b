"""The id of what an engine computes with: equal ids give equal bits."""

from __future__ import annotations

from ...models.foreign.version import transformers_version
from ...options import MODEL, TREE, BuildRequest
from ...platforms.loading import LoadedDevice
from ...platforms.numerics_id import numerics_id, sources_with


def numerics_of(request: BuildRequest, loaded: LoadedDevice) -> str:
    """The id of what computes. Files and version of another distribution's platform count as
    Headwater's do."""
    options = request.options
    origin = loaded.registration
    assert options.model_folder is not None
    source = options.model_folder.name if options.load_format == "auto" else options.load_format
    what = [
        source,
        request.model,
        request.dtype,
        request.kv_format,
        request.activations,
        request.rounds_tokens,
    ]
    if request.model.quantization is not None and not request.model.quantization.is_of_integers:
        # CPUs multiply numbers of eight bits as they are, unless they are expanded.
        what.append(options.activation_dtype == MODEL)
    if request.model.depends_on_length:
        what.append(options.max_model_len or request.model.max_position_embeddings)
    if request.model.foreign is not None:
        what.append(transformers_version())
    if not origin.is_built_in:
        what += [origin.name, origin.distribution, origin.version]
    if options.adapter_memory:
        # No kernel multiplies and gates at once where adapters stand between the two.
        what.append("adapters")
    if request.is_tree:
        # The tree gives the same bits in every layout.
        what.append(TREE)
    elif options.layout.num_ranks > 1:
        what.append(options.layout)
    return numerics_id(loaded.device.environment(), *what, sources=sources_with(loaded.sources))

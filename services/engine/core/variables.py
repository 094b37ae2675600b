"""Variables of the environment between a supervisor, an engine's server and its core."""

COSTS_VARIABLE = "HEADWATER_STEP_COSTS_DIR"
"""Names the folder of measured costs of steps. The server sets it for its core."""
CORE_FORKS_FD = "HEADWATER_CORE_FORKS_FD"
"""File descriptor of a socket that asks a server of forks for cores. A supervisor sets it for the
server."""
WEIGHTS_HOLDER_FD = "HEADWATER_WEIGHTS_HOLDER_FD"
"""File descriptor of a socket to a process that holds the weights' device memory between two lives
of the engine. A supervisor sets it for the server, and the server hands it to its core."""

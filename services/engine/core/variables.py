"""Variables of the environment between a supervisor, an engine's server and its core."""

COSTS_VARIABLE = "HEADWATER_STEP_COSTS_DIR"
"""Names the folder of measured costs of steps. The server sets it for its core."""
CORE_FORKS_FD = "HEADWATER_CORE_FORKS_FD"
"""File descriptor of a socket that asks a server of forks for cores. A supervisor sets it for the
server."""

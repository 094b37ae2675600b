"""Variables of the environment that the server sets for its core alone."""

COSTS_VARIABLE = "HEADWATER_STEP_COSTS_DIR"
"""Names the folder of measured costs of steps."""

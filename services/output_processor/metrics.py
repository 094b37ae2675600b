"""Metrics of an output processor. Counted by frame, never by token."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

TOKENS = Counter("headwater_output_tokens", "Tokens that engines sent")
ENGINE_FRAMES = Counter("headwater_output_engine_frames", "Frames that engines sent")
FRAME_SECONDS = Histogram(
    "headwater_output_frame_seconds",
    "Time to turn an engine's frame into text",
    buckets=(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
)
GATEWAY_FRAMES = Counter("headwater_output_gateway_frames", "Frames sent to gateways")
STREAMS = Gauge("headwater_output_streams", "Streams that are open now")
FINISHES = Counter("headwater_output_finishes", "Streams that ended", ["reason"])
ENGINES_LOST = Counter("headwater_output_engines_lost", "Sessions with engines that broke")
LOGS = Gauge("headwater_output_logs", "Requests that can be resumed now")
LOG_BYTES = Gauge("headwater_output_log_bytes", "About what their logs take of memory")

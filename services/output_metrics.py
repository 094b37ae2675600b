"""What an output processor tells Prometheus. Counted a frame, never a token."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

TOKENS = Counter("headwater_output_tokens", "Tokens that engines sent")
ENGINE_FRAMES = Counter("headwater_output_engine_frames", "Frames that engines sent")
GATEWAY_FRAMES = Counter("headwater_output_gateway_frames", "Frames sent to gateways")
STREAMS = Gauge("headwater_output_streams", "Streams that are open now")
FINISHES = Counter("headwater_output_finishes", "Streams that ended", ["reason"])
ENGINES_LOST = Counter("headwater_output_engines_lost", "Sessions with engines that broke")

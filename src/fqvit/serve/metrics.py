"""The metrics of the server, in Prometheus format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The counters of one server, in a registry of their own, so that several servers in one process do not mix them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("fqvit_requests", "Finished requests.", ("endpoint", "status"), registry=self.registry)
        self.seconds = Histogram(
            "fqvit_request_seconds",
            "Time from the headers of a request to its answer.",
            ("endpoint",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.images = Counter("fqvit_images", "Images that a model has run on.", ("model",), registry=self.registry)
        self.batch = Histogram(
            "fqvit_batch_images", "Images per run of a model.", ("model",), buckets=BATCHES, registry=self.registry
        )
        self.waiting = Gauge("fqvit_queue_images", "Images accepted and not answered yet.", registry=self.registry)

    def ran(self, model: str, images: int) -> None:
        """Count one run of a model."""
        self.images.labels(model).inc(images)
        self.batch.labels(model).observe(images)

    def finished(self, endpoint: str, status: int, seconds: float) -> None:
        """Count one request."""
        self.requests.labels(endpoint, str(status)).inc()
        self.seconds.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)

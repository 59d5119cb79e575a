"""What the server tells about itself: Prometheus metrics and structured logs."""

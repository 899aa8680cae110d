"""Supporting tools: store files, checks, provider setup, container images, TensorBoard, rehearsal, quickstart."""

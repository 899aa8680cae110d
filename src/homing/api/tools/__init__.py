"""The tools around a run: files in a store, checks, setup of a provider, container image, TensorBoard, quickstart."""

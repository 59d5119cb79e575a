"""SERVE: fine-tuning jobs: files of examples become steps, checkpoints and a version."""

"""Training connections: parameter groups, the trainer, its monitor and its checkpoints."""
